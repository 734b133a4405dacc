"""A diagnosis in words that keep exact, conditional and measured apart."""

from __future__ import annotations

from entroprefill_rag.diagnosis.results import Diagnosis, NextToken


def sentences(found: Diagnosis) -> tuple[str, ...]:
    """What a diagnosis says, one sentence each; the most important first."""
    if found.layer is None or found.next_token is None:
        return (f"Nothing was pruned: {found.reason}", "So there is nothing to compare; name a layer to force one.")
    said = [] if found.fixed_rows_hold else [_violated(found)]
    last = found.layers[-1]
    worst = max(found.layers, key=lambda one: max(one.eta))
    said += [
        f"{'Forced' if found.forced else 'Accepted'} at layer {found.layer}: {len(found.removed)} chunks removed, "
        f"{found.retained} of {found.tokens} tokens retained.",
        _token(found.next_token),
        f"Measured: after the last layer a retained token is at most {last.distance:.3g} away from the full run (l2), "
        f"the last token {last.last_distance:.3g}.",
        f"Measured: above layer {found.layer} some retained row discards up to {max(worst.eta):.2g} (layer "
        f"{worst.layer}); at layer {found.layer} the most is {max(found.eta):.2g}. Chunk rows count.",
        f"Conditional: the bound on that distance is {last.bound:.3g} ({last.bound_diameter:.3g} with value diameters, "
        f"{last.bound_token:.3g} token by token). It rests on constants measured on this very request: estimates, not "
        "guarantees, for any other.",
        _verdict(found.next_token),
    ]
    if found.fixed_rows_hold:
        rows = sum(one.fixed_rows.rows for one in found.layers)
        said.append(f"Exact: the fixed-row bound held on all {rows} rows looked at.")
    return tuple(said)


def _violated(found: Diagnosis) -> str:
    layers = [one.layer for one in found.layers if one.fixed_rows.violations or one.fixed_rows.diameter_violations]
    return (
        f"BUG: the fixed-row bound, a theorem, failed at layers {layers}. Nothing below can be relied on; please "
        "report this with the name of the model."
    )


def _token(seen: NextToken) -> str:
    same = "the same" if seen.top1_agrees else "another"
    return (
        f"Measured: {same} top-1 next token; KL(full || pruned) {seen.divergence:.3g} nats; a logit changes by at most "
        f"{seen.largest_change:.3g}, the margin is {seen.margin_full:.3g} in the full run and {seen.margin_pruned:.3g} "
        "in the pruned one."
    )


def _verdict(seen: NextToken) -> str:
    best = seen.best_bound
    if best is None or seen.logit_cap is None:
        return "Conditional: no bound on the logits, because the head is not an RMS norm and a matrix."
    largest = max(seen.margin_full, seen.margin_pruned)
    if best >= seen.logit_cap:
        return (
            f"Conditional: the bound on the logits is vacuous: {best:.3g}, and no logit can change by more than "
            f"{seen.logit_cap:.3g} whatever happens."
        )
    if seen.proved:
        return (
            f"Conditional: no logit moves by more than {best:.3g}, less than half the margin: the greedy token is the "
            "same, if the constants hold."
        )
    times = f"{best / largest:.3g} times the margin" if largest else "with no margin at all"
    verdict = "the bound on the logits is vacuous" if seen.vacuous else "nothing follows for the greedy token"
    return (
        f"Conditional: {verdict}: they move by at most {best:.3g}, {times}, where the true change is "
        f"{seen.largest_change:.3g}."
    )
