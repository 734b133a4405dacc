"""What the report says, section by section, in plain strings: the Markdown and the HTML page show the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from entroprefill_rag.bench.rows import PARTS
from entroprefill_rag.bench.statistics import LEAST_REQUESTS

Data = Mapping[str, Any]
NOTHING = "–"


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and a table where ``head`` is not empty."""

    title: str
    text: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def number(value: float, digits: int = 2) -> str:
    """A number for people."""
    return f"{value:,.{digits}f}"


def between(value: Data | None, *, signed: bool = False, scale: float = 1.0, digits: int = 2) -> str:
    """A mean with its interval."""
    if value is None:
        return NOTHING
    form = f"{'+' if signed else ''},.{digits}f"
    mean, low, high = (format(value[name] * scale, form) for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def mean(value: Data | None, *, scale: float = 1.0, digits: int = 2) -> str:
    """A mean alone."""
    return NOTHING if value is None else number(value["mean"] * scale, digits)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or NOTHING


def sections(summary: Data) -> list[Section]:
    """All sections, in their order."""
    return [
        _run(summary),
        _quality(summary),
        _cost(summary),
        _agreement(summary),
        _beside(summary),
        _by_set(summary),
        _decisions(summary),
        _chance(summary),
        _methods(summary),
        _failures(summary),
    ]


def _table(summary: Data, columns: Mapping[str, Callable[[Data], str]]) -> tuple[tuple[str, ...], ...]:
    return tuple((one["name"], *(cell(one) for cell in columns.values())) for one in summary["methods"])


def _run(summary: Data) -> Section:
    stamp = summary["stamp"]
    told = ", ".join(f"{name} {value}" for name, value in stamp.items() if value is not None and name != "format")
    count = sum(summary["questions"].values())
    sets = ", ".join(f"{name} {n}" for name, n in summary["questions"].items())
    done = "" if summary["complete"] else " The run was stopped before its last question, by its time or by hand."
    return Section(
        "How it was run",
        (
            f"Command: `{summary['command']}`",
            f"{count} questions ({sets}), {summary['answerable']} of them with an answer.{done}",
            f"Stamp {summary['stamp_digest']}: {told}.",
            *summary["notes"],
            "One process, one model, one prompt template, greedy decoding; the order of the methods is drawn anew for "
            "each question. Brackets are 95% bootstrap intervals over questions; n is the number of answers. A "
            "value that is the same on all questions has an interval without width, which says little. With so few "
            "questions the numbers are indicative.",
        ),
    )


def _quality(summary: Data) -> Section:
    columns: dict[str, Callable[[Data], str]] = {
        "n": lambda one: str(one["n"]),
        "failed": lambda one: str(one["failed"]),
        "answer found": lambda one: between(one["found"]),
        "token F1": lambda one: between(one["f1"]),
        "need met": lambda one: between(one["need_met"]),
        "chunk tokens kept": lambda one: between(one["kept_share"]),
        "found, less full": lambda one: between(one["paired"]["found"], signed=True),
        "F1, less full": lambda one: between(one["paired"]["f1"], signed=True),
    }
    text = (
        "Answer found: an accepted string occurs in the answer, as whole words. Need met: all gold chunks were kept, "
        "or any one where one is enough; questions without an answer have none. The two last columns are paired: the "
        "same questions, this method less the full run.",
    )
    return Section("Quality", text, ("method", *columns), _table(summary, columns))


def _part(part: str) -> Callable[[Data], str]:
    return lambda one: mean(one["seconds"][part], digits=3)


def _cost(summary: Data) -> Section:
    full = next((one for one in summary["methods"] if one["name"] == "full"), None)

    def kv(one: Data) -> str:
        return mean(one["kv_bytes"], scale=1e-6, digits=1)

    columns: dict[str, Callable[[Data], str]] = {
        "first token, s": lambda one: between(one["ttft"]),
        "speed-up": lambda one: between(one["speedup"]),
        **{f"{part}, s": _part(part) for part in PARTS},
        "all, s": lambda one: mean(one["total"]),
        "tokens x layers, of full": lambda one: mean(one["work"]),
        "prompt tokens": lambda one: mean(one["prompt_tokens"], digits=0),
        "KV cache, MB": kv,
    }
    if any(one["peak_bytes"] is not None for one in summary["methods"]):
        columns["peak, MB"] = lambda one: mean(one["peak_bytes"], scale=1e-6, digits=1)
    text: tuple[str, ...] = (
        "First token: from the question to the first token, choosing chunks included (select: embedding, ranking, "
        "compressing, a first pass). shallow: prefill up to the decision, all of it where nothing is decided; rule: "
        "reading rows, proposing, auditing; deep: prefill above the accepted layer. Speed-up: the full run's time to "
        "the first token over this one's, geometric mean over the same questions. Tokens x layers counts the answering "
        "model alone, an embedder's or compressor's work does not show in it. KV cache: by sizes, after the prefill.",
    )
    if full is None or full["ttft"] is None:
        text = (*text, "The full run has no time to compare with.")
    return Section("Cost", text, ("method", *columns), _table(summary, columns))


def _agreement(summary: Data) -> Section:
    columns: dict[str, Callable[[Data], str]] = {
        "same text": lambda one: between(one["same_text"]),
        "same first token": lambda one: between(one["same_first"]),
        "KL, nats": lambda one: between(one["kl"], digits=3),
        "declines, no answer": lambda one: between(one["declines"]["unanswerable"]),
        "declines, answer there": lambda one: between(one["declines"]["answerable"]),
    }
    text = (
        "With the full run: the whole answer, its first token, and the divergence of the first token's distribution, "
        "KL(full || method). Declines: the answer says, by set phrases, that it cannot be given; right where the "
        "chunks hold no answer, wrong where they do.",
    )
    return Section("Agreement, and questions without an answer", text, ("method", *columns), _table(summary, columns))


def _beside(summary: Data) -> Section:
    rows = [
        (
            one["name"],
            *(between(one["beside"][key], signed=True) for key in ("found", "f1", "need_met")),
            between(one["beside"]["speedup"]),
        )
        for one in summary["methods"]
        if one["beside"] is not None and one["name"] != "embedder"
    ]
    text = (
        "Each method less the embedder's short prompt, on the same questions. Speed-up: the embedder's time to the "
        "first token, embedding included, over this one's; below 1 the embedder is faster.",
    )
    head = ("method", "found", "token F1", "need met", "speed-up")
    return Section("Beside the embedder's short prompt", text, head, tuple(rows))


def _by_set(summary: Data) -> Section:
    rows = []
    for name, methods in summary["sets"].items():
        for method, one in methods.items():
            cells = (str(one["n"]), str(one["failed"]), *(between(one[key]) for key in ("found", "f1", "need_met")))
            beside = one["beside"] or {"need_met": None}
            rows.append((name, method, *cells, between(beside["need_met"], signed=True), mean(one["ttft"])))
    head: tuple[str, ...] = ("set", "method", "n", "failed", "answer found", "token F1", "need met")
    head = (*head, "need met, less embedder", "first token, s")
    return Section("By set", (), head, tuple(rows))


def _decided(summary: Data) -> Iterator[tuple[str, Data]]:
    return ((one["name"], one["decision"]) for one in summary["methods"] if one["decision"] is not None)


def _decisions(summary: Data) -> Section:
    rows = tuple(
        (name, between(d["accepted"]), *(_counts(d[key]) for key in ("outcomes", "layers", "reasons", "verdicts")))
        for name, d in _decided(summary)
    )
    text = ("Accepted: share of requests that were pruned. Verdicts are of the layers looked at, summed.",)
    return Section(
        "Accepted and bypassed", text, ("method", "accepted", "outcomes", "at layer", "reasons", "verdicts"), rows
    )


def _chance(summary: Data) -> Section:
    rows = []
    for name, decision in _decided(summary):
        tests = {"all": decision["chance"]["all"], **decision["chance"]["layers"]}
        for layer, one in tests.items():
            if one is not None:
                kept = (str(one["requests"]), f"{one['kept']} of {one['gold']}", number(one["expected"], 1))
                rows.append((name, layer, *kept, f"{one['p']:.2g}"))
    text = (
        "Gold chunks kept by accepted removals, against random removals of as many chunks from the same requests. p: "
        "probability that chance keeps as many or more; exact (sum of hypergeometric counts). Single layers are tested "
        f"from {LEAST_REQUESTS} accepted requests on. The p values are not corrected for their number.",
    )
    head = ("method", "layer", "requests", "gold kept", "by chance", "p")
    return Section("Better than chance?", text, head, tuple(rows))


def _methods(summary: Data) -> Section:
    rows = [(one["name"], one["what"], one["origin"]) for one in summary["methods"]]
    return Section("The methods", (), ("method", "what it does", "where it comes from"), tuple(rows))


def _failures(summary: Data) -> Section:
    rows = [
        (one["name"], str(failure["count"]), failure["message"])
        for one in summary["methods"]
        for failure in one["failures"]
    ]
    skipped = {one["name"]: one["skipped"] for one in summary["methods"] if one["skipped"]}
    text = [f"Not run: {one['name']}: {one['reason']}" for one in summary["not_run"]]
    if skipped:
        text.append(f"Skipped because the question has no gold chunk: {_counts(skipped)}.")
    if not rows:
        text.append("No method failed on any question.")
    return Section("Failed, skipped, not run", tuple(text), ("method", "times", "message") if rows else (), tuple(rows))
