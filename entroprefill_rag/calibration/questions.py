"""Training questions that need no labels: a sentence of one chunk becomes the question, so the gold chunk is known.

Inverse cloze (Lee et al. 2019, "Latent Retrieval for Weakly Supervised Open Domain Question Answering"), in forms that
are not only lexical overlap: words dropped, an answer taken out and asked for, a few words of a topic, two chunks asked
for at once, and the sentence itself removed from its chunk. Everything follows from the texts and a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from entroprefill_rag.errors import ProfileError
from entroprefill_rag.request import Chunk, RagRequest

FORMS = ("asked", "dropped", "topic", "two_chunks", "removed")
"""Forms, in the turn in which they are made."""

HARD = ("removed",)
"""Forms that are measured and fit nothing: where the sentence is gone, no head can find it, only its surroundings."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"“])")
_WORD = re.compile(r"[^\W_]+(?:['’.,-][^\W_]+)*")
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")
_YEAR = re.compile(r"(1[5-9]|20)\d\d")
# Runs of capitalised words, not the sentence's first word.
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][\w’'-]+(?: [A-Z][\w’'-]+)*")
# Words that say nothing of what a sentence is about.
_LITTLE = frozenset(
    re.findall(
        "[a-z]+",
        "a an the of in on at to for from by with and or but as is are was were be been it its his her their this that "
        "which who whom after before into over under not no so than then there since until when where while one each "
        "every only had has have may must can could would should did does do also still about up out",
    )
)
_LEAST_WORDS = 6
_LEAST_SENTENCES = 2


@dataclass(frozen=True)
class TrainingQuestion:
    """A question whose gold chunks are known because it was made from them.

    Attributes:
        request: what the model is shown.
        gold: positions of the gold chunks.
        form: one of :data:`FORMS`.
        group: which text the question came from: questions of one group never stand on both sides of a split.
    """

    request: RagRequest
    gold: tuple[int, ...]
    form: str
    group: int


def packaged_chunks() -> tuple[Chunk, ...]:
    """The passages that come with the package, written for this."""
    text = (files("entroprefill_rag.calibration") / "passages.txt").read_text(encoding="utf-8")
    blocks = [block.strip() for block in text.split("# ") if block.strip()]
    parts = [block.split("\n", 1) for block in blocks]
    return tuple(Chunk(id=f"p{i}", title=title, text=body.strip()) for i, (title, body) in enumerate(parts))


def make_questions(
    pools: Sequence[Sequence[Chunk]], count: int, *, seed: int = 0, chunks: int = 10
) -> tuple[TrainingQuestion, ...]:
    """Make training questions from chunks.

    Args:
        pools: chunks that may stand together in a prompt: one pool for a folder of documents, one per request else.
        count: questions wanted.
        seed: of all choices.
        chunks: chunks of a prompt, at most; fewer where the pool holds fewer.

    Returns:
        At most ``count`` questions, forms in turn. Fewer where the texts do not give more: a sentence is used once for
        a form.

    Raises:
        ProfileError: no pool holds four chunks of which one has two sentences of six words.
    """
    rng = random.Random(seed)
    usable = [list(pool) for pool in pools if len(pool) >= 4]
    sources = [
        (p, i, sentences)
        for p, pool in enumerate(usable)
        for i, chunk in enumerate(pool)
        if len(sentences := _sentences(chunk.text)) >= _LEAST_SENTENCES
    ]
    if not sources:
        sizes = sorted((len(pool) for pool in pools), reverse=True)[:5]
        raise ProfileError(
            f"no training question can be made of chunk counts {sizes}: at least one group of four chunks is needed, "
            f"with a chunk of {_LEAST_SENTENCES} sentences of {_LEAST_WORDS} words or more; give longer documents"
        )
    made: list[TrainingQuestion] = []
    seen: set[tuple[str, int, int, str]] = set()
    misses = 0
    turn = 0
    while len(made) < count and misses < 20 * len(FORMS):
        form = FORMS[turn % len(FORMS)]
        turn += 1
        p, i, sentences = rng.choice(sources)
        sentence = rng.choice(sentences)
        key = (form, p, i, sentence)
        question = None if key in seen else _question(form, usable[p], i, sentence, rng, chunks, sources, p)
        seen.add(key)
        if question is None:
            misses += 1
            turn -= 1 if rng.random() < 0.8 else 0  # a form that these texts do not give must not stop the others
            continue
        misses = 0
        made.append(question)
    return tuple(made)


def _sentences(text: str) -> list[str]:
    parts = (part.strip() for part in _SENTENCE.split(" ".join(text.split())))
    return [part for part in parts if len(_WORD.findall(part)) >= _LEAST_WORDS]


def _question(
    form: str,
    pool: list[Chunk],
    place: int,
    sentence: str,
    rng: random.Random,
    chunks: int,
    sources: list[tuple[int, int, list[str]]],
    pool_number: int,
) -> TrainingQuestion | None:
    """One question, or None where the sentence does not give this form."""
    gold = [place]
    shown = dict(enumerate(pool))
    if form == "asked":
        query = _asked(sentence, rng)
    elif form == "dropped":
        query = _with_words_dropped(sentence, rng)
    elif form == "topic":
        query = _topic(sentence, pool[place].title, rng)
    elif form == "two_chunks":
        others = [(i, found) for p, i, found in sources if p == pool_number and i != place]
        if not others:
            return None
        other, found = rng.choice(others)
        gold.append(other)
        one, two = _short(sentence, rng), _short(rng.choice(found), rng)
        query = f"What do the documents say about {one}, and what about {two}?"
    else:
        left = " ".join(pool[place].text.split()).replace(sentence, " ")
        query = _asked(sentence, rng) or _with_words_dropped(sentence, rng)
        if len(_sentences(left)) < 1 or sentence in left:
            return None
        shown[place] = pool[place].model_copy(update={"text": " ".join(left.split())})
    if query is None:
        return None
    picked = [*gold, *_distractors(pool, gold, chunks - len(gold), rng)]
    rng.shuffle(picked)
    renamed = [Chunk(id=f"c{position}", title=shown[i].title, text=shown[i].text) for position, i in enumerate(picked)]
    request = RagRequest(chunks=tuple(renamed), query=query)
    return TrainingQuestion(request, tuple(sorted(picked.index(i) for i in gold)), form, pool_number * 100_003 + place)


def _distractors(pool: list[Chunk], gold: list[int], count: int, rng: random.Random) -> list[int]:
    """Half of them near the gold chunk in the documents (the same topic, mostly), the rest from anywhere."""
    rest = [i for i in range(len(pool)) if i not in gold]
    near = sorted(rest, key=lambda i: abs(i - gold[0]))[: count // 2]
    far = [i for i in rest if i not in near]
    return near + rng.sample(far, min(count - len(near), len(far)))


def _asked(sentence: str, rng: random.Random) -> str | None:
    """A number or a name is taken out of the sentence and asked for."""
    found = [
        *((match, "number") for match in _NUMBER.finditer(sentence)),
        *((match, "name") for match in _NAME.finditer(sentence)),
    ]
    if not found:
        return None
    match, kind = rng.choice(found)
    answer = match.group()
    before, after = sentence[: match.start()].split(), sentence[match.end() :].split()
    if kind == "name":
        ask = rng.choice(("Who or what is meant", "Which name belongs here", "Which name is it"))
    elif _YEAR.fullmatch(answer):
        ask = rng.choice(("In which year", "When was it that", "What year"))
    else:
        ask = rng.choice(("How many", "What number", "How much"))
    if kind == "number" and before and before[-1] in ("in", "on", "by", "of", "at", "to"):
        before = before[:-1]
    rest = _lowered(" ".join([*before, *after])).rstrip(" .!?")
    return f"{ask}: {rest}?" if kind == "name" else f"{ask} {rest}?"


def _with_words_dropped(sentence: str, rng: random.Random) -> str:
    """Two fifths of the words that matter are gone, the rest in order."""
    words = sentence.rstrip(" .!?").split()
    heavy = [i for i, word in enumerate(words) if _heavy(word)]
    gone = set(rng.sample(heavy, int(0.4 * len(heavy))))
    kept = [word for i, word in enumerate(words) if i not in gone]
    return f"What is known about this: {_lowered(' '.join(kept))}?"


def _topic(sentence: str, title: str, rng: random.Random) -> str | None:
    """A few words of the sentence, in another order, none of the chunk's title."""
    named = {word.lower() for word in _WORD.findall(title)}
    words = [word for word in _WORD.findall(sentence) if _heavy(word) and word.lower() not in named]
    if len(words) < 3:
        return None
    picked = rng.sample(words, min(len(words), 4))
    return f"Tell me about {', '.join(picked[:-1])} and {picked[-1]}."


def _short(sentence: str, rng: random.Random) -> str:
    words = [word for word in _WORD.findall(sentence) if _heavy(word)]
    start = rng.randrange(max(1, len(words) - 3))
    return " ".join(words[start : start + 4])


def _heavy(word: str) -> bool:
    return word.strip(".,;:!?").lower() not in _LITTLE


def _lowered(text: str) -> str:
    """The first letter small, unless the word looks like a name."""
    first, _, rest = text.partition(" ")
    lower = first.lower()
    return f"{lower} {rest}" if lower in _LITTLE else text
