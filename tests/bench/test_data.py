"""The questions of the benchmark: what is committed is what the script draws, and none is in the smoke set."""

import importlib.util
from collections import Counter
from pathlib import Path

from entroprefill_rag.bench.questions import load

DATA = Path(__file__).parent.parent.parent / "benchmarks" / "data"


def test_eight_questions_of_each_set_and_none_of_the_smoke_set(smoke_questions):
    asked = load([DATA / "bench.jsonl"])
    sets = ("nq20", "hotpotqa", "musique", "ramdocs_conflict", "tatqa_tables", "squad2")
    assert Counter(one.set for one in asked) == dict.fromkeys(sets, 8)
    assert not {one.id for one in asked} & {one["id"] for one in smoke_questions}
    assert any(not one.answers for one in asked)


def test_the_script_draws_the_committed_questions(data_dir):
    spec = importlib.util.spec_from_file_location("build_bench_data", DATA / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.build(data_dir) == (DATA / "bench.jsonl").read_text(encoding="utf-8")
