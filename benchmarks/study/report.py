"""From the study's rows to docs/study.md and its plots. Every number on the page is computed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from scipy.stats import beta

mpl.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]
BOUNDS = ("hoeffding", "kl", "empirical_bernstein", "betting")


def interval(hits: float, n: int) -> tuple[float, float]:
    """Clopper-Pearson, 95%."""
    low = 0.0 if hits == 0 else float(beta.ppf(0.025, hits, n - hits + 1))
    return low, 1.0 if hits == n else float(beta.ppf(0.975, hits + 1, n - hits))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join("-" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def middle(values: Sequence[float | None], form: str = ".3g") -> str:
    """Median and range of what is known."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    if not known:
        return "-"
    return f"{np.median(known):{form}} ({min(known):{form}} to {max(known):{form}})"


def share(hits: int, n: int) -> str:
    """A share with its interval and n."""
    if not n:
        return "-"
    low, high = interval(hits, n)
    return f"{hits / n:.2f} [{low:.2f}, {high:.2f}]"


def trials(rows: Sequence[Row], keep: Callable[[Row], bool]) -> list[Row]:
    """Layer trials of all questions that pass a filter."""
    return [trial for row in rows for trial in row["layers"] if keep(trial)]


def write(
    rows: Sequence[Row],
    page: Path,
    left_out: int = 0,
    most_tokens: int | None = None,
    arguments: Sequence[str] = (),
) -> None:
    """Write the page and its plots beside it; ``left_out`` questions had prompts of more than ``most_tokens``."""
    if not rows:
        raise SystemExit("no rows to report: run the study first")
    stamp = rows[0]["stamp"]
    plots = page.parent / "study"
    plots.mkdir(parents=True, exist_ok=True)
    sources = Counter(row["source"] for row in rows)
    tokens = [row["tokens"] for row in rows]
    text = [
        "# Study: what the bounds are worth on real questions",
        "",
        f"Written by `{' '.join(('python benchmarks/study', *arguments))}` (`make study` for all); nothing on "
        "this page is typed in. "
        f"{stamp['model']}, {stamp['dtype']}, entroprefill {stamp['version']}, torch {stamp['torch']}, transformers "
        f"{stamp['transformers']}, {stamp['machine']}. {len(rows)} questions of {len(sources)} data sets, "
        f"{min(tokens)} to {max(tokens)} tokens (median {np.median(tokens):.0f}); "
        f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes in all. "
        + (f"{left_out} prompts of more than {most_tokens} tokens were left out. " if left_out else "")
        + "Head weights are the paper's (Renyi), without a profile. Intervals are 95% (Clopper-Pearson) over "
        "questions; with so few questions they are wide. A number without an interval is a median with its range.",
        "",
        *assumptions(rows, plots),
        *tightness(rows, plots),
        *audits(rows, plots),
        *passing(rows, plots),
    ]
    page.write_text("\n".join(text) + "\n", encoding="utf-8")


def assumptions(rows: Sequence[Row], plots: Path) -> list[str]:
    """(a) Do the assumptions hold."""
    known = [row["diagnosis"] for row in rows if row["diagnosis"]]
    by_layer: dict[int, list[Row]] = {}
    for found in known:
        for one in found["rows"]:
            by_layer.setdefault(one["layer"], []).append(one)
    lines = ["## (a) Do the assumptions of the conditional bound hold", ""]
    if not by_layer:
        return [*lines, "Nothing was pruned, so nothing was measured.", ""]
    forced = sum(found["forced"] for found in known)
    lines += [
        f"{len(known)} of {len(rows)} requests (the others had nothing to prune or could not be diagnosed), "
        f"{forced} of them forced at the layer that would have saved most, because the audit or "
        "a cap turned it down. Estimates on these requests, not guarantees. `drift` is the largest discarded mass of "
        "any retained row at that layer minus the audited layer's own; rows of chunks count.",
        "",
        table(
            ("layer", "requests", "Lipschitz ratio (L)", "drift (D)", "largest discarded mass", "token map (M)"),
            (
                (
                    layer,
                    len(found),
                    middle([one["lipschitz"] for one in found]),
                    middle([one["drift"] for one in found]),
                    middle([one["eta"] for one in found]),
                    middle([one["token_map"] for one in found]),
                )
                for layer, found in sorted(by_layer.items())
            ),
        ),
        "",
    ]
    drifts = [one["drift"] for found in by_layer.values() for one in found]
    close = sum(drift < 0.05 for drift in drifts)
    lines += [
        f"Drift below 0.05 in {close} of {len(drifts)} layer measurements: "
        + (
            "deeper layers mostly discard no more than the audited one."
            if close > len(drifts) / 2
            else "small discarded mass at the audited layer does not carry over to deeper layers."
        ),
        "",
        "![drift and Lipschitz ratios by layer](study/assumptions.png)",
        "",
    ]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    layers = sorted(by_layer)
    for axis, name, label in ((axes[0], "drift", "drift of discarded mass"), (axes[1], "lipschitz", "Lipschitz ratio")):
        values = [[one[name] for one in by_layer[layer] if one[name] is not None] for layer in layers]
        axis.boxplot([value or [np.nan] for value in values], positions=layers, widths=0.6, manage_ticks=False)
        axis.set(xlabel="layer", ylabel=label)
    axes[1].set_yscale("log")
    figure.savefig(plots / "assumptions.png", dpi=90)
    plt.close(figure)
    return lines


def tightness(rows: Sequence[Row], plots: Path) -> list[str]:
    """(b) How tight is each bound."""
    seen = trials(rows, lambda one: one.get("envelope") is not None and one["max_discarded"] > 1e-4)
    over = [one["envelope"] / one["max_discarded"] for one in seen]
    per_head = [one["envelope_per_head"] / one["max_discarded"] for one in seen]
    useless = sum(one["envelope"] >= 1.0 for one in seen)
    known = [row["diagnosis"] for row in rows if row["diagnosis"]]
    steps = [one for found in known for one in found["rows"]]
    lines = [
        "## (b) How tight is each bound",
        "",
        table(
            ("bound", "over the true value: median (range)", "n"),
            (
                ("envelope / largest discarded mass", middle(over), len(over)),
                ("envelope per head / largest discarded mass", middle(per_head), len(per_head)),
                (
                    "fixed-row bound 2 V eta / true change, per layer",
                    middle(_inverse(steps, "fixed_median")),
                    len(steps),
                ),
                ("the same with value diameters", middle(_inverse(steps, "fixed_diameter_median")), len(steps)),
                (
                    "the same, tightest row of the layer",
                    middle(_inverse(steps, "fixed_diameter_tightest")),
                    len(steps),
                ),
                (
                    "conditional bound / true distance, last layer",
                    middle([found["rows"][-1]["ratio"] for found in known]),
                    len(known),
                ),
                (
                    "conditional bound token by token / true distance, last layer",
                    middle([found["rows"][-1]["ratio_token"] for found in known]),
                    len(known),
                ),
            ),
        ),
        "",
        f"The envelope is vacuous (1) in {useless} of {len(seen)} proposals. The conditional bound on the logits is "
        f"vacuous (above the most that any logit can change) in {sum(bool(found['vacuous']) for found in known)} of "
        f"{len(known)} requests; it proves the greedy token unchanged in "
        f"{sum(bool(found['next'] and found['next']['proved']) for found in known)}. The fixed-row bound, a theorem, "
        + ("held on every row looked at." if all(found["holds"] for found in known) else "FAILED: a bug.")
        + " A bound that is vacuous says nothing, and no claim rests on it.",
        "",
        *solvers(rows),
    ]
    if seen:
        figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
        axis.scatter([one["max_discarded"] for one in seen], [one["envelope"] for one in seen], s=5, alpha=0.4)
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        axis.set(xlabel="largest discarded mass", ylabel="envelope", xscale="log", yscale="log")
        figure.savefig(plots / "envelope.png", dpi=90)
        plt.close(figure)
        lines += ["![envelope against the largest discarded mass](study/envelope.png)", ""]
    return lines


def solvers(rows: Sequence[Row]) -> list[str]:
    """Greedy beside exact, and both beside the dual bound."""
    solved = [one["solver"] for one in trials(rows, lambda one: "solver" in one)]
    if not solved:
        return []
    same_target = [one for one in solved if one["greedy_saved"] >= one["exact_saved"]]
    optimal = sum(one["greedy_mass"] <= one["exact_mass"] * (1 + 1e-6) for one in same_target)
    excess = [one["greedy_mass"] / one["exact_mass"] for one in same_target if one["exact_mass"] > 0]
    most = sum(one["greedy_most"] == one["exact_most"] for one in solved)
    gap = [1 - one["greedy_most"] / one["exact_most"] for one in solved if one["exact_most"]]
    dual = [1 - one["greedy_most"] / one["dual"] for one in solved if one["dual"]]
    exact_dual = [1 - one["exact_most"] / one["dual"] for one in solved if one["dual"]]
    timed = sum("time limit" in one["solver"] for one in solved)
    return [
        f"**Greedy and exact removal**, {len(solved)} proposals at cap 0.2 (time limit reached: {timed}). Least pooled "
        f"mass at the target: greedy is optimal in {optimal} of {len(same_target)} where it saves as much as the exact "
        f"set, and removes {middle(excess)} times the exact set's mass. Most tokens, without a stop: greedy is optimal "
        f"in {most} of {len(solved)}; mean gap to the optimum {np.mean(gap):.1%}, to the dual bound "
        f"{np.mean(dual):.1%}; from the optimum to the dual bound {np.mean(exact_dual):.1%}.",
        "",
    ]


def _inverse(steps: Sequence[Row], name: str) -> list[float | None]:
    return [1 / one[name] if one.get(name) else None for one in steps]


def audits(rows: Sequence[Row], plots: Path) -> list[str]:
    """(c) False acceptances on real rows."""
    from measure import DELTA, DRAWS, SEEDS

    seen = [one["audits"] for one in trials(rows, lambda one: "audits" in one)]
    lines = [
        "## (c) How often an audit accepts falsely",
        "",
        f"Real attention rows of {len(seen)} proposals; the truth is the exact mean over all rows of the documents and "
        f"the query. {SEEDS} audits of {DRAWS} draws each. `one head`: the limit is set just below the worst head's "
        f"true mean and that head is tested at the full delta = {DELTA}: every acceptance is false, and its rate may "
        "not exceed delta. `all heads`: the same limit with the union over layers and heads. `power`: how often the "
        "default limit is shown where every head's true mean is at most half of it.",
        "",
    ]
    rates = {
        bound: {
            kind: [one[bound][kind] for one in seen if one[bound][kind] is not None]
            for kind in ("false", "union", "power")
        }
        for bound in BOUNDS
    }

    def pooled(values: Sequence[float]) -> str:
        return share(round(sum(values) * SEEDS), len(values) * SEEDS) if values else "-"

    lines += [
        table(
            ("bound", "one head, mean rate", "largest rate of a proposal", "all heads", "power", "n"),
            (
                (
                    bound,
                    pooled(rates[bound]["false"]),
                    f"{max(rates[bound]['false'], default=0):.3f}",
                    pooled(rates[bound]["union"]),
                    pooled(rates[bound]["power"]),
                    len(rates[bound]["false"]),
                )
                for bound in BOUNDS
            ),
        ),
        "",
        f"Of {SEEDS} audits at a true rate of exactly {DELTA}, the largest of {len(rates['betting']['false'])} rates "
        f"is expected near {_expected_largest(DELTA, SEEDS, len(rates['betting']['false'])):.3f} by chance.",
        "",
        "![false acceptances by bound](study/audits.png)",
        "",
    ]
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    axis.boxplot(
        [rates[bound]["false"] or [np.nan] for bound in BOUNDS], tick_labels=[b.replace("_", "\n") for b in BOUNDS]
    )
    axis.axhline(DELTA, color="red", linewidth=0.8)
    axis.set(ylabel="false acceptances, one head at its limit")
    figure.savefig(plots / "audits.png", dpi=90)
    plt.close(figure)
    return lines


def _expected_largest(rate: float, draws: int, n: int) -> float:
    from scipy.stats import binom

    return float(binom.ppf(0.5 ** (1 / max(n, 1)), draws, rate)) / draws


def passing(rows: Sequence[Row], plots: Path) -> list[str]:
    """(d) What passes, and what it costs."""
    caps = sorted({trial["cap"] for row in rows for trial in row["layers"]})
    layers = sorted({trial["layer"] for row in rows for trial in row["layers"]})
    lines = [
        "## (d) What passes",
        "",
        "Each layer asked by itself, whether or not an earlier one would have been taken: share of requests whose "
        "proposal passes the caps and the audit; of those, tokens saved, gold chunks kept, and what a random choice of "
        "as many chunks would have kept.",
        "",
    ]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for cap in caps:
        body, points = [], []
        for layer in layers:
            asked = trials(rows, lambda one: one["cap"] == cap and one["layer"] == layer)  # noqa: B023
            taken = [one for one in asked if one.get("accepted")]
            gold = [one for one in taken if one["gold_kept"] is not None]
            kept = float(np.mean([one["gold_kept"] for one in gold])) if gold else None
            chance = float(np.mean([1 - one["removed"] / one["chunks"] for one in gold])) if gold else None
            points.append((layer, len(taken) / len(asked) if asked else np.nan, kept, chance))
            body.append(
                (
                    layer,
                    share(len(taken), len(asked)),
                    middle([one["saved_share"] for one in taken], ".2f"),
                    None if kept is None else f"{kept:.2f}",
                    None if chance is None else f"{chance:.2f}",
                    middle([one["doc_mass"] for one in asked], ".2f"),
                )
            )
        axes[0].plot([p[0] for p in points], [p[1] for p in points], marker=".", label=f"cap {cap:g}")
        axes[1].plot(
            [p[0] for p in points],
            [np.nan if p[2] is None or p[3] is None else p[2] - p[3] for p in points],
            marker=".",
            label=f"cap {cap:g}",
        )
        if cap == 0.2:
            lines += [
                f"At the default cap {cap:g}:",
                "",
                table(("layer", "accepted", "saved share", "gold kept", "random", "document mass"), body),
                "",
            ]
    axes[0].set(xlabel="layer", ylabel="share of requests accepted")
    axes[1].set(xlabel="layer", ylabel="gold kept above random")
    axes[1].axhline(0, color="grey", linewidth=0.8)
    axes[0].legend(fontsize=7)
    figure.savefig(plots / "passing.png", dpi=90)
    plt.close(figure)
    lines += ["![share accepted, gold kept above random](study/passing.png)", "", *_answers(rows, caps)]
    return lines


def _answers(rows: Sequence[Row], caps: Sequence[float]) -> list[str]:
    """End to end: the first accepted layer, and the answer."""
    body = []
    for cap in (None, *caps):
        runs = [(row, run) for row in rows for run in row["answers"] if run["cap"] == cap]
        pruned = [(row, run) for row, run in runs if run["outcome"] == "pruned"]
        gold = [
            1 - len(set(run["dropped"]) & set(row["gold"])) / len(row["gold"]) for row, run in pruned if row["gold"]
        ]
        answered = [run["found"] for _, run in runs if run["found"] is not None]
        body.append(
            (
                "full" if cap is None else f"{cap:g}",
                None if cap is None else share(len(pruned), len(runs)),
                middle([run["layer"] for _, run in pruned], ".0f"),
                middle([run["saved_share"] for _, run in pruned], ".2f"),
                f"{np.mean(gold):.2f}" if gold else None,
                share(sum(answered), len(answered)),
                None if cap is None else share(sum(run["same_text"] for _, run in pruned), len(pruned)),
            )
        )
    known = [row["diagnosis"] for row in rows if row["diagnosis"] and row["diagnosis"]["next"]]
    agree = sum(found["next"]["top1_agrees"] for found in known)
    refused = [
        run["reason"] for row in rows for run in row["answers"] if run["cap"] == 0.2 and run["outcome"] != "pruned"
    ]
    verdicts = [one["verdict"] for one in trials(rows, lambda one: one["cap"] == 0.2)]
    from measure import NEW_TOKENS

    return [
        f"End to end, greedy decoding of {NEW_TOKENS} tokens, at each cap (caps and the audit's limit together):",
        "",
        table(
            ("cap", "pruned", "layer", "saved share", "gold kept", "answer found", "same text as full, where pruned"),
            body,
        ),
        "",
        f"Next token, full against pruned, over the {len(known)} removals of (a): the same in "
        f"{share(agree, len(known))}; KL divergence {middle([found['next']['divergence'] for found in known])} nats.",
        "",
        f"Why requests were not pruned at the default cap: {_counted(refused)}. Verdicts of the layers there, asked "
        f"one by one, before any audit: {_counted(verdicts)}.",
        "",
    ]


def _counted(codes: Iterable[str]) -> str:
    return "; ".join(f"`{code}` {count}" for code, count in Counter(codes).most_common()) or "none"
