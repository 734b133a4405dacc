"""Which rows and heads find the gold chunks, layer by layer: last row, mean, Renyi, profile, question, evidence.

    python benchmarks/ablation.py --page docs/ablation.md

Only attention is read: no caps, no audit, no answers. Chunks are ordered as the rule orders them (by mass per token up
to smoothing and concentration), and a share of the *chunks* is kept. What each question showed is appended to a
file as soon as it is there: a run that was stopped goes on where it was. The profile is the shipped one of the model,
or a file (--profile); it was fitted to training questions made from other texts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from entroprefill_rag import Chunk, LocalBackend, PruningConfig, RagRequest, __version__
from entroprefill_rag.calibration.measure import Measured, measure
from entroprefill_rag.calibration.profile import ModelProfile
from entroprefill_rag.calibration.ranking import Batch, auc, interval, pooled, recall, stack
from entroprefill_rag.rule.evidence import excess
from entroprefill_rag.rule.pooling import head_weights, profile_weights

Floats = NDArray[np.float64]
ROOT = Path(__file__).parent.parent
METHODS = ("last row", "mean", "renyi", "question", "labels", "profile", "evidence")
NUMBERS = ("mean", "last", "entropy", "question", "before")
SHARES = (0.25, 0.5)
FORMAT = 2
PICKED, FOLDS = 3, 5
HOW_TO_READ = (
    "Written by `benchmarks/ablation.py`. Attention alone: no caps, no audit, no answers. Chunks are ordered by mass "
    "per token: of the last row or of all proposal rows with all heads alike (last row, mean), with Renyi weights, or "
    "with the profile's heads of that layer (profile); or by what the question's own rows place on them beyond the "
    "rows before it, with all heads of that layer alike (question) or with the profile's heads of that and earlier "
    "layers (evidence: what is used). Beside them (labels), the same with the three heads that find gold best on four "
    "fifths of these very questions, for the last fifth: what labels would buy. A share of the *chunks* is kept. "
    "Recall: share of the gold chunks kept. Need met: all of them kept, or any one where one is enough. Intervals: "
    "bootstrap over questions, of the paired difference at that layer alone."
)


def questions(files: Sequence[Path], most: int | None) -> list[dict[str, Any]]:
    """The first ``most`` questions of every set that have gold chunks, taken from the sets in turn."""
    piles = []
    for file in files:
        lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        able = [{**one, "file": one.get("set", file.stem)} for one in lines if one["gold_chunk_ids"]]
        able = [one for one in able if len(one["chunks"]) > 2]
        names = list(dict.fromkeys(one["file"] for one in able))
        piles += [[one for one in able if one["file"] == name][:most] for name in names]
    longest = max((len(pile) for pile in piles), default=0)
    return [pile[i] for i in range(longest) for pile in piles if i < len(pile)]


def request_of(question: dict[str, Any]) -> tuple[RagRequest, list[int]]:
    """A labelled question as a request, and the positions of its gold chunks."""
    chunks = [Chunk(id=part["id"], text=part["text"], title=part.get("title") or "") for part in question["chunks"]]
    ids = [chunk.id for chunk in chunks]
    gold = [ids.index(chunk) for chunk in question["gold_chunk_ids"]]
    return RagRequest(chunks=chunks, query=question["question"]), gold


def row_of(question: dict[str, Any], seen: Measured, stamp: dict[str, Any]) -> dict[str, Any]:
    """What one question showed, as JSON data; numbers only, four digits."""

    def told(values: Floats) -> Any:
        return [float(f"{value:.4g}") for value in values.ravel()]

    return {
        "stamp": stamp,
        "id": question["id"],
        "file": question["file"],
        "need": question["meta"]["gold_need"],
        "n_tokens": seen.n_tokens,
        "layers": seen.layers,
        "tokens": seen.tokens.tolist(),
        "gold": list(seen.gold),
        "heads": seen.entropy.shape[1],
        "mean": told(seen.mean()),
        "last": told(seen.last()),
        "entropy": told(seen.entropy),
        "question": told(np.stack(seen.question)),
        "before": told(np.stack(seen.before)),
    }


def rows_in(file: Path, stamp: dict[str, Any]) -> list[dict[str, Any]]:
    """What earlier runs with the same stamp have measured."""
    if not file.is_file():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if row["stamp"] == stamp]


class Table:
    """All questions, and what each method keeps at each layer.

    Args:
        rows: from :func:`row_of`; those whose monitorable layers are not the most common ones are left out.
        profile: the model's, or None: the method is then left out.
        groups: GQA groups.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], profile: ModelProfile | None, groups: int) -> None:
        sets = [tuple(row["layers"]) for row in rows]
        usual = max(set(sets), key=sets.count)
        self.rows = [row for row in rows if tuple(row["layers"]) == usual]
        self.layers: tuple[int, ...] = usual
        self.batch = Batch.of([np.array(row["tokens"]) for row in self.rows], [row["gold"] for row in self.rows])
        self.methods = METHODS if profile is not None else METHODS[:-2]
        self._profile, self._groups = profile, groups
        self._arrays = {name: [self._shaped(row, name) for row in self.rows] for name in NUMBERS}
        self.recall = {
            (share, method): np.stack([recall(self._scores(method, at), self.batch, share) for at in range(len(usual))])
            for share in SHARES
            for method in self.methods
        }
        """``[layers, questions]`` share of the gold chunks kept."""

    def _shaped(self, row: dict[str, Any], name: str) -> Floats:
        shape = (len(self.layers), row["heads"], *(() if name == "entropy" else (len(row["tokens"]),)))
        return np.array(row[name]).reshape(shape)

    def _scores(self, method: str, at: int) -> Floats:
        name = "last" if method == "last row" else "mean"
        masses = stack([one[at] for one in self._arrays[name]], self.batch)
        heads, config = masses.shape[1], PruningConfig()
        if method in ("last row", "mean"):
            return pooled(masses, np.full(heads, 1.0 / heads), self.batch)
        if method == "question":
            return self._evidence([(self.layers[at], head, 1.0 / heads) for head in range(heads)], 0.0)
        if method == "labels":
            return self._labelled(at)
        if method == "evidence" and self._profile is not None:
            return self._evidence(dict(self._profile.pooled).get(self.layers[at], ()), self._profile.mu_min)
        mass = masses.sum(axis=2)
        entropy = [one[at] for one in self._arrays["entropy"]]
        v = dict(self._profile.weights).get(self.layers[at]) if method == "profile" and self._profile else None
        if v is not None and self._profile is not None:
            least = self._profile.mu_min
            each = [profile_weights(v, one >= least, groups=self._groups, zeta=config.zeta)[0] for one in mass]
        else:
            each = [
                head_weights(h2, one >= config.mu_min, groups=self._groups, zeta=config.zeta, tau=config.tau)[0]
                for h2, one in zip(entropy, mass, strict=True)
            ]
        return pooled(masses, np.stack(each), self.batch)

    def _evidence(self, heads: Sequence[tuple[int, int, float]], least: float) -> Floats:
        scores = np.zeros(self.batch.there.shape)
        for layer, head, share in heads:
            place = self.layers.index(layer)
            question, before = (
                stack([one[place, head][None] for one in self._arrays[name]], self.batch)[:, 0]
                for name in ("question", "before")
            )
            shares, mass = excess(question, before)
            scores += np.where(mass >= least, share, 0.0)[:, None] * shares
        return np.asarray(scores / self.batch.tokens)

    def _labelled(self, at: int) -> Floats:
        """Evidence of the heads that find gold best on other questions, picked with labels."""
        heads = [(layer, head) for layer in self.layers[: at + 1] for head in range(self.rows[0]["heads"])]
        scores = np.stack([self._alone[one] for one in heads], axis=1)
        found = np.stack([self._found[one] for one in heads], axis=1)
        fold = np.arange(len(self.rows)) % FOLDS
        out = np.zeros_like(scores[:, 0])
        for held in range(FOLDS):
            best = np.argsort(-found[fold != held].mean(axis=0), kind="stable")[:PICKED]
            out[fold == held] = scores[fold == held][:, best].mean(axis=1)
        return out

    @cached_property
    def _alone(self) -> dict[tuple[int, int], Floats]:
        """Evidence per token of every head by itself, ``[Q, K]``."""
        every = ((layer, head) for layer in self.layers for head in range(self.rows[0]["heads"]))
        return {(layer, head): self._evidence([(layer, head, 1.0)], 0.0) for layer, head in every}

    @cached_property
    def _found(self) -> dict[tuple[int, int], Floats]:
        """``[Q]`` AUC of every head by itself."""
        return {one: auc(scores, self.batch) for one, scores in self._alone.items()}

    def met(self, share: float, method: str) -> Floats:
        """``[layers, questions]`` whether what a question needs was kept: all gold chunks, or any one."""
        every = np.array([row["need"] == "all" for row in self.rows])
        found = self.recall[share, method]
        return np.where(every, found > 1 - 1e-9, found > 0).astype(np.float64)

    def earliest(self, share: float, method: str, bar: float) -> int | None:
        """The first layer whose mean recall reaches ``bar``."""
        means = self.recall[share, method].mean(axis=1)
        return next((layer for layer, mean in zip(self.layers, means, strict=True) if mean >= bar - 1e-9), None)


def page(table: Table, about: str) -> str:
    """The tables, in Markdown."""
    rng = np.random.default_rng(0)
    n, methods = len(table.rows), table.methods
    lines = [about, "", HOW_TO_READ, "", f"n = {n} questions; gold kept by a random choice: "]
    lines[-1] += ", ".join(f"{table.batch.chance(share):.2f} at {share:.0%}" for share in SHARES) + "."
    for share in SHARES:
        lines += ["", f"## {share:.0%} of the chunks kept", ""]
        names = [*(f"recall, {name}" for name in methods), *(f"need met, {name}" for name in methods)]
        if "profile" in methods:
            names.append("evidence - mean, recall (95%)")
        lines += ["| layer | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        for at, layer in enumerate(table.layers):
            cells = [f"{table.recall[share, name][at].mean():.2f}" for name in methods]
            cells += [f"{table.met(share, name)[at].mean():.2f}" for name in methods]
            if "profile" in methods:
                paired = table.recall[share, "evidence"][at] - table.recall[share, "mean"][at]
                mean, low, high = interval(paired, rng)
                cells.append(f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]")
            lines.append(f"| {layer} | " + " | ".join(cells) + " |")
        best = {name: table.recall[share, name].mean(axis=1) for name in methods}
        lines += [
            "",
            "| method | best recall | at layer | first layer with 0.9 of its best | with 0.9 of the mean's best |",
        ]
        lines.append("|---|---|---|---|---|")
        for name in methods:
            own, mean = best[name].max(), best["mean"].max()
            first, other = table.earliest(share, name, 0.9 * own), table.earliest(share, name, 0.9 * mean)
            where = table.layers[int(best[name].argmax())]
            lines.append(f"| {name} | {own:.2f} | {where} | {first} | {'never' if other is None else other} |")
    lines += ["", "## By set, recall at 25%, over the layers", ""]
    lines += [
        "| set | n | " + " | ".join(f"{name}: best (layer)" for name in methods) + " |",
        "|---|---|" + "---|" * len(methods),
    ]
    for file in sorted({row["file"] for row in table.rows}):
        mine = np.array([row["file"] == file for row in table.rows])
        found = [table.recall[0.25, name][:, mine].mean(axis=1) for name in methods]
        cells = [f"{one.max():.2f} ({table.layers[int(one.argmax())]})" for one in found]
        lines.append(f"| {file} | {int(mine.sum())} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def stamp_of(backend: LocalBackend) -> dict[str, Any]:
    """What a row must share with others to stand beside them."""
    info = backend.model_info
    return {"format": FORMAT, "model": info.name, "dtype": info.dtype, "fingerprint": info.fingerprint}


def gather(backend: LocalBackend, asked: Sequence[dict[str, Any]], file: Path, tell: Callable[[str], None]) -> None:
    """Measure the questions that the file does not hold yet."""
    stamp = stamp_of(backend)
    have = {(row["file"], row["id"]) for row in rows_in(file, stamp)}
    left = [one for one in asked if (one["file"], one["id"]) not in have]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        for question in track(left, description="Measuring", console=Console(stderr=True)):
            request, gold = request_of(question)
            try:
                seen = measure(backend, request, gold)
            except ValueError as error:  # too long for the model, mostly: told, not hidden
                tell(f"{question['file']} {question['id']}: left out: {error}")
                continue
            out.write(json.dumps(row_of(question, seen, stamp)) + "\n")
            out.flush()


def main() -> None:
    """Measure what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, nargs="+", default=[ROOT / "benchmarks" / "data" / "bench.jsonl"])
    parser.add_argument("--questions", type=int, help="at most this many of each set")
    parser.add_argument("--profile", type=Path, help="a profile; the default is the shipped one of the model")
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "ablation" / "rows.jsonl")
    parser.add_argument("--page", type=Path, help="write the tables to this file as well")
    given = parser.parse_args()
    asked = questions(given.data, given.questions)
    with closing(LocalBackend.from_pretrained(given.model, dtype=given.dtype, profile=given.profile)) as backend:
        gather(backend, asked, given.rows, print)
        wanted = {(one["file"], one["id"]) for one in asked}
        rows = [row for row in rows_in(given.rows, stamp_of(backend)) if (row["file"], row["id"]) in wanted]
        if not rows:
            raise SystemExit("nothing could be measured")
        profile = backend.profile
        training = "" if profile is None else f", fitted to {profile.training.questions} training questions made from "
        if profile is not None:
            training += f"{profile.training.source} texts"
        about = (
            f"{backend.model_info.name}, {backend.model_info.dtype}, entroprefill_rag {__version__}; profile: "
            f"{'none' if profile is None else profile.name}{training}; sets: "
            f"{', '.join(sorted({one['file'] for one in asked}))}, {given.questions or 'all'} questions of each."
        )
        text = page(Table(rows, profile, backend.anatomy.kv_heads), about)
    print(text)
    if given.page is not None:
        given.page.write_text("# Ablation: which weighting finds the gold chunks\n\n" + text, encoding="utf-8")


if __name__ == "__main__":
    main()
