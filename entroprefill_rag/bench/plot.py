"""Quality against time to the first token, by method."""

from __future__ import annotations

import io
from typing import Any

from entroprefill_rag.errors import ConfigError


def quality_svg(summary: dict[str, Any]) -> str:
    """Share of answers found against mean seconds to the first token, with 95% intervals, as SVG text.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(f"the plot needs {error.name}; run: pip install -e '.[bench]' in a clone") from error
    # Same numbers, same bytes: no date, no random ids. Letters are drawn as paths: no font is needed, no name is text.
    with mpl.rc_context({"svg.hashsalt": "entroprefill", "svg.fonttype": "path", "text.parse_math": False}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for at, method in enumerate(summary["methods"]):
            found, ttft = method["found"], method["ttft"]
            if found is None or ttft is None:
                continue
            axes.errorbar(
                ttft["mean"],
                found["mean"],
                xerr=[[max(0.0, ttft["mean"] - ttft["low"])], [max(0.0, ttft["high"] - ttft["mean"])]],
                yerr=[[max(0.0, found["mean"] - found["low"])], [max(0.0, found["high"] - found["mean"])]],
                fmt="o",
                color=f"C{at % 10}",
                elinewidth=0.7,
            )
            axes.annotate(
                method["name"], (ttft["mean"], found["mean"]), xytext=(5, 4), textcoords="offset points", fontsize=8
            )
        # Times may lie a factor of twenty apart.
        axes.set_xscale("log")
        for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            ticks("{x:g}")
        axes.set_xlabel("seconds to the first token (mean, 95% interval)")
        axes.set_ylabel("answers found (share, 95% interval)")
        axes.grid(alpha=0.3)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
