"""The report as files: Markdown, one HTML page, the plot, and the numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from entroprefill_rag.bench.plot import quality_svg
from entroprefill_rag.bench.rows import Store
from entroprefill_rag.bench.sections import Section, sections
from entroprefill_rag.bench.summary import summarise
from entroprefill_rag.report.plain import one_line

TITLE = "Benchmark: pruning in mid-prefill beside what one would do instead"
WRITTEN = "Written by `entroprefill bench --report-only`; every number comes from the summary beside it."


def markdown(summary: Mapping[str, Any], plot: str) -> str:
    """The page in Markdown.

    Args:
        summary: from :func:`entroprefill_rag.bench.summary.summarise`.
        plot: path of the plot, from the page.
    """
    first, *rest = sections(summary)
    lines = [f"# {TITLE}", "", WRITTEN, "", *_markdown(first)]
    lines += ["", f"![Answers found against time to the first token, by method]({plot})"]
    for section in rest:
        lines += ["", *_markdown(section)]
    return "\n".join(lines) + "\n"


def _markdown(section: Section) -> list[str]:
    lines = [f"## {section.title}"]
    for paragraph in section.text:
        lines += ["", one_line(paragraph, 4000).replace("<", "&lt;")]
    if section.head and section.rows:
        lines += ["", _line(section.head), "|" + "---|" * len(section.head), *map(_line, section.rows)]
    return lines


def _line(cells: tuple[str, ...]) -> str:
    told = (one_line(cell, 1000).replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return "| " + " | ".join(told) + " |"


def html(summary: Mapping[str, Any], svg: str) -> str:
    """The page in HTML: no script, nothing loaded; all text escaped, the plot our own."""
    environment = Environment(
        loader=PackageLoader("entroprefill_rag.bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    inline = svg[svg.index("<svg") :]
    return environment.get_template("bench.html").render(
        title=TITLE, sections=_clean(sections(summary)), plot=Markup(inline)
    )


def _clean(told: list[Section]) -> list[Section]:
    return [
        Section(
            one.title,
            tuple(one_line(text, 4000).replace("`", "") for text in one.text),
            one.head,
            tuple(tuple(one_line(cell, 1000) for cell in row) for row in one.rows),
        )
        for one in told
    ]


def to_json(summary: Mapping[str, Any]) -> str:
    """The numbers as JSON text."""
    return json.dumps(summary, indent=1, ensure_ascii=False) + "\n"


def write(store: Store, docs: Path | None = None) -> list[Path]:
    """Write the report of a run's last stamp beside its rows, and into a documentation folder.

    Args:
        store: the run.
        docs: gets ``benchmark.md``, ``benchmark/quality.svg`` and ``benchmark/summary.json``.

    Raises:
        RecordError: there is no row, or the folder is no run's.
    """
    run = store.run()
    summary = summarise(store.rows(run.get("stamp")), run)
    svg = quality_svg(summary)
    files = {
        store.folder / "report.md": markdown(summary, "quality.svg"),
        store.folder / "report.html": html(summary, svg),
        store.folder / "quality.svg": svg,
        store.folder / "summary.json": to_json(summary),
    }
    if docs is not None:
        (docs / "benchmark").mkdir(parents=True, exist_ok=True)
        files |= {
            docs / "benchmark.md": markdown(summary, "benchmark/quality.svg"),
            docs / "benchmark" / "quality.svg": svg,
            docs / "benchmark" / "summary.json": to_json(summary),
        }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)
