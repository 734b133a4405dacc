"""The study: do the assumptions hold, how tight is each bound, do the audits err as seldom as they say, what passes.

    python benchmarks/study                                     # SmolLM2-135M on benchmarks/data/smoke.jsonl
    python benchmarks/study --model NAME --data FILE.jsonl ...   # any model, any labelled questions

Each question's numbers are appended to a file of JSON lines as soon as they are there: a run that was stopped goes on
where it was. The page and its plots are made from that file alone (--report-only makes them anew).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import measure, request_of
from report import write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from entroprefill_rag import LocalBackend, __version__
from entroprefill_rag.errors import PromptOverflowError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FORMAT = 1


def questions(files: list[Path]) -> list[dict[str, Any]]:
    """Labelled questions of all files, in order, those with chunks only."""
    found = [
        json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    return [question for question in found if question["chunks"]]


def fits(backend: LocalBackend, question: dict[str, Any], most: int) -> bool:
    """Whether its prompt has at most so many tokens."""
    try:
        return backend.layout(request_of(question)).n_tokens <= most
    except PromptOverflowError:
        return False


def spread(found: list[dict[str, Any]], most: int | None) -> list[dict[str, Any]]:
    """At most so many, evenly over the order of the files, so that every data set has its share."""
    if most is None or most >= len(found):
        return found
    return [found[i * len(found) // most] for i in range(most)]


def done(file: Path, stamp: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier run with the same stamp has measured, by question."""
    if not file.is_file():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row["id"]: row for row in rows if row["stamp"] == stamp}


def main() -> None:
    """Measure what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, nargs="+", default=[HERE.parent / "data" / "smoke.jsonl"])
    parser.add_argument("--questions", type=int, help="at most this many")
    parser.add_argument(
        "--most-tokens", type=int, default=4096, help="leave longer prompts out; the page says how many"
    )
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "study" / "rows.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "study.md")
    parser.add_argument("--report-only", action="store_true", help="make the page from the rows that are there")
    given = parser.parse_args()
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    if given.report_only:
        rows = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines() if line.strip()]
        write(rows, given.page)
        return
    backend = LocalBackend.from_pretrained(given.model, dtype=given.dtype)
    known = questions(given.data)
    short = [one for one in known if fits(backend, one, given.most_tokens)]
    wanted = spread(short, given.questions)
    stamp = {
        "format": FORMAT,
        "model": backend.model_info.name,
        "fingerprint": backend.model_info.fingerprint,
        "dtype": backend.model_info.dtype,
        "version": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    rows_by_id = done(given.rows, stamp)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("questions", total=len(wanted))
        for seed, question in enumerate(wanted):
            progress.update(bar, description=question["id"][:40])
            if question["id"] not in rows_by_id:
                started = time.perf_counter()
                row = {"stamp": stamp, **measure(backend, question, seed), "seconds": time.perf_counter() - started}
                with given.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                rows_by_id[question["id"]] = row
            progress.advance(bar)
    left_out = len(known) - len(short)
    write([rows_by_id[question["id"]] for question in wanted], given.page, left_out, given.most_tokens, sys.argv[1:])
    console.print(f"wrote {given.page}")


if __name__ == "__main__":
    sys.exit(main())
