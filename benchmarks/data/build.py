"""Makes bench.jsonl: eight questions of each of six public data sets, chosen by a seeded draw.

    ENTROPREFILL_DATA=FOLDER python benchmarks/data/build.py

The folder holds the sets as JSON lines in the form that the README beside this file describes. Drawn from are the
questions of at most 2,500 SmolLM2 tokens of context that are not in smoke.jsonl. The questions of a set that have no
answer are drawn apart, so that they have their share. Shorter ones come first, so that a run that is cut short has seen
most sets.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETS = ("nq20", "hotpotqa", "musique", "ramdocs_conflict", "tatqa_tables", "squad2")
EACH = 8
MOST_TOKENS = 2500
SEED = 20240

Record = dict[str, Any]


def records(file: Path) -> list[Record]:
    """All lines of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def chosen(known: list[Record], taken: set[str], seed: str) -> list[Record]:
    """Eight of a set, the shorter ones first."""
    able = [one for one in known if one["id"] not in taken and one["meta"]["context_tokens"]["smollm2"] <= MOST_TOKENS]
    piles = [[one for one in able if bool(one["answers"]) is answerable] for answerable in (True, False)]
    second = round(EACH * len(piles[1]) / len(able))
    draw = random.Random(seed)
    drawn = draw.sample(piles[0], EACH - second) + draw.sample(piles[1], second)
    return sorted(drawn, key=lambda one: (one["meta"]["context_tokens"]["smollm2"], one["id"]))


def build(folder: Path) -> str:
    """The text of bench.jsonl."""
    taken = {one["id"] for one in records(HERE / "smoke.jsonl")}
    lines = []
    for name in SETS:
        for one in chosen(records(folder / f"{name}.jsonl"), taken, f"{SEED} {name}"):
            lines.append(json.dumps({**one, "set": name}, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the file."""
    given = os.environ.get("ENTROPREFILL_DATA")
    if not given or not Path(given).is_dir():
        sys.exit("set ENTROPREFILL_DATA to the folder that holds nq20.jsonl and the other sets")
    (HERE / "bench.jsonl").write_text(build(Path(given)), encoding="utf-8")


if __name__ == "__main__":
    main()
