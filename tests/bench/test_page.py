"""Figures in docs/benchmark.md come from the numbers beside it, and from nowhere else."""

import json
from pathlib import Path

import pytest

from entroprefill_rag.bench.plot import quality_svg
from entroprefill_rag.bench.report import markdown

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def summary():
    file = DOCS / "benchmark" / "summary.json"
    if not (DOCS / "benchmark.md").is_file():
        pytest.skip("docs/benchmark.md is not there; `entroprefill bench --report-only bench-report --docs docs`")
    return json.loads(file.read_text(encoding="utf-8"))


def test_the_page_is_what_its_numbers_make(summary):
    page = (DOCS / "benchmark.md").read_text(encoding="utf-8")
    assert page == markdown(summary, "benchmark/quality.svg"), "run `entroprefill bench --report-only DIR --docs docs`"


def test_the_plot_shows_the_methods_of_the_page(summary):
    shown = (DOCS / "benchmark" / "quality.svg").read_text(encoding="utf-8")
    assert shown.count("LineCollection") == quality_svg(summary).count("LineCollection")


def test_the_page_names_the_command_and_the_stamp(summary):
    page = (DOCS / "benchmark.md").read_text(encoding="utf-8")
    assert summary["command"]
    assert summary["command"] in page
    assert summary["stamp_digest"] in page
