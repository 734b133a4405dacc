"""Checks of one layer's proposal: masses, scores, the set, caps, envelope, dual bound (sections 4 and 5)."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.config import HeadProfile
from entroprefill_rag.record import LayerTrial
from entroprefill_rag.rule.dual import dual_value
from entroprefill_rag.rule.removal import RemovalProblem, within_reach
from entroprefill_rag.rule.scoring import evidence_scores, relative_masses
from entroprefill_rag.rule.stability import envelope, envelope_per_head
from entroprefill_rag.verify.facts import Facts
from entroprefill_rag.verify.findings import Findings

Floats = NDArray[np.float64]

NOT_PROPOSED = {
    "pooled_mass": (),
    "evidence": (),
    "scores": (),
    "removed": (),
    "stopped": None,
    "solver": None,
    "tokens_saved": 0,
    "saved_share": 0.0,
    "max_discarded": None,
    "max_discarded_per_head": (),
    "max_discarded_per_row": (),
    "cap_slack": None,
    "pooled_discarded": None,
    "envelope": None,
    "envelope_per_head": (),
    "dual": None,
}
"""What a trial holds that ended before a set was looked for."""

_EXACT = r"exact( \([a-z ,;]+\))?|greedy \(exact(:| no better;) [a-z ;]+\)"


def check_set(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> bool:
    """The removed set and its size; False where nothing can be computed from it."""
    k, removed = len(facts.tokens), trial.removed
    good = found.require(
        list(removed) == sorted(set(removed)) and all(0 <= i < k and facts.removable[i] for i in removed),
        f"{path}.removed",
        removed,
        "ascending positions of removable chunks",
        "protected chunks stay",
    )
    good &= found.expect(f"{path}.pooled_mass", len(trial.pooled_mass), k, "one mass per chunk")
    good &= found.expect(f"{path}.scores", len(trial.scores), k, "one score per chunk")
    good &= _check_evidence(trial, facts, path, found)
    if not good:
        return False
    saved = int(facts.tokens[list(removed)].sum())
    found.expect(f"{path}.tokens_saved", trial.tokens_saved, saved, "tokens of the removed chunks")
    found.expect(f"{path}.saved_share", trial.saved_share, saved / max(facts.total, 1), "of all chunk tokens")
    found.require(
        len(removed) <= facts.k_max,
        f"{path}.removed",
        len(removed),
        f"at most {facts.k_max}",
        f"at least m0 = {facts.config.m0} chunks stay",
    )
    found.require(
        saved <= facts.most, f"{path}.tokens_saved", saved, f"at most {facts.most}", "max_saving is not exceeded"
    )
    stopped = "target" if saved >= facts.target else "exhausted"
    found.expect(f"{path}.stopped", trial.stopped, stopped, "removal stops at target_saving")
    # Where no chunk may go at all, the exact solver leaves it to greedy.
    exact = facts.config.solver == "exact" and facts.k_max > 0
    pattern = _EXACT if exact else "greedy"
    found.require(
        re.fullmatch(pattern, str(trial.solver)) is not None, f"{path}.solver", trial.solver, pattern, "as configured"
    )
    return True


def _check_evidence(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> bool:
    """Evidence: only where a profile names heads for it, one excess per chunk, at most 1 in all."""
    if not trial.evidence:
        return True
    profile = facts.config.head_weights
    pools = isinstance(profile, HeadProfile) and facts.config.evidence == "auto" and profile.heads_at(trial.layer)
    good = found.require(
        bool(pools), f"{path}.evidence", trial.evidence, "none", "only a profile pools evidence over layers"
    )
    good &= found.expect(f"{path}.evidence", len(trial.evidence), len(facts.tokens), "one share per chunk")
    most, total = max(trial.evidence), float(sum(trial.evidence))
    for value, rule in ((most, "a share of attention, less another"), (total, "shares of all that is on the chunks")):
        good &= found.require(value <= 1 + 1e-7, f"{path}.evidence", value, "at most 1", rule)
    return good


def check_masses(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> None:
    """Discarded mass against caps, envelope and pooled mass; scores against relative masses."""
    model, rows, removed = facts.record.model, len(facts.rows), list(trial.removed)
    heads, groups = model.query_heads, model.kv_heads
    weights, lost = np.array(trial.head_weights), np.array(trial.max_discarded_per_head)
    if len(weights) != heads or not found.expect(
        f"{path}.max_discarded_per_head", len(lost), heads, "one number per query head"
    ):
        return
    largest = trial.max_discarded
    found.expect(f"{path}.max_discarded", largest, float(lost.max()), "the largest of max_discarded_per_head")
    most = float(facts.caps.max())
    rule = "no head loses more than its cap, nor more than its envelope"
    found.between(
        f"{path}.max_discarded_per_head",
        lost.tolist(),
        [0.0] * heads,
        np.minimum(most, np.array(trial.envelope_per_head)).tolist(),
        rule,
    )
    _caps(trial, facts, path, found)
    pooled = np.array(trial.pooled_mass)
    q = float(pooled[removed].sum())
    found.expect(f"{path}.pooled_discarded", trial.pooled_discarded, q, "pooled mass of the removed chunks")
    follows = envelope(q, rows=rows, query_heads=heads, zeta=facts.config.zeta)
    found.expect(f"{path}.envelope", trial.envelope, follows, "min(1, H_Q * W_p * q / zeta)")
    per_head = envelope_per_head(q, rows=rows, groups=groups, weights=weights)
    found.expect(f"{path}.envelope_per_head", trial.envelope_per_head, per_head.tolist(), "min(1, G * W_p * q / w[h])")
    most_pooled = float(weights @ lost) / groups
    found.between(
        f"{path}.pooled_discarded", [q], [most_pooled / rows], [most_pooled], "a mean over rows, of their maxima"
    )
    # doc_mass and the pooled masses are means of the same numbers, with other weights.
    r = heads // groups
    found.between(
        f"{path}.doc_mass",
        [trial.doc_mass],
        [float(pooled.sum()) / (r * weights.max())],
        [float(pooled.sum()) / (r * weights.min())],
        "pooled masses are means of the same masses, weighted",
    )
    scores = np.array(trial.scores)
    if trial.evidence:
        at_share = evidence_scores(np.array(trial.evidence), facts.tokens).tolist()
        found.expect(f"{path}.scores", scores.tolist(), at_share, "S = evidence over the share of all tokens")
        return
    relative = np.log(relative_masses(pooled, facts.tokens, facts.config.alpha))
    found.between(
        f"{path}.scores",
        scores.tolist(),
        (relative - 1e-7).tolist(),
        (relative + facts.config.lam + 1e-7).tolist(),
        "S = ln(l) + lam * kappa, kappa in [0, 1]",
    )


def _caps(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> None:
    """Every proposal row under its cap, and the smallest distance to one."""
    slack, lost = trial.cap_slack, np.array(trial.max_discarded_per_row)
    if not found.expect(f"{path}.max_discarded_per_row", len(lost), len(facts.rows), "one number per proposal row"):
        return
    rule = "no row loses more than its cap"
    place = f"{path}.max_discarded_per_row"
    found.between(place, lost.tolist(), [0.0] * len(lost), facts.caps.tolist(), rule)
    found.expect(place, float(lost.max()), trial.max_discarded, "the largest of them is max_discarded")
    left = float((facts.caps - lost).min())
    if facts.config.rho is None or slack is None:
        found.expect(f"{path}.cap_slack", slack, left, "the smallest cap less discarded mass")
    else:
        found.between(f"{path}.cap_slack", [slack], [0.0], [left], "a relative cap leaves no more than the absolute")


def check_order(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> None:
    """Greedy, replayed on row maxima: what stayed was not cheaper than the caps, and nothing was tried too late."""
    if trial.solver != "greedy" or not trial.row_max:
        return
    rule = "chunks go by ascending score, until the target, as long as they fit"
    maxima, caps = np.array(trial.row_max).T, facts.caps.max()
    taken, saved = np.zeros(maxima.shape[1]), 0
    count = 0
    scores = np.array(trial.scores)
    within = facts.removable
    if facts.config.reach == "target":
        uncapped = RemovalProblem(
            masses=np.zeros((1, 1, len(scores))),
            caps=np.ones((1, 1)),
            tokens=facts.tokens,
            removable=facts.removable,
            m0=facts.config.m0,
            target_tokens=facts.target,
            max_tokens=facts.most,
        )
        within = within_reach(uncapped, scores)
    for i in np.lexsort((-np.arange(len(scores)), scores)).tolist():
        over = saved >= facts.target or count >= facts.k_max
        fits = bool(within[i]) and saved + int(facts.tokens[i]) <= facts.most
        if i in trial.removed:
            if not found.require(not over and fits, f"{path}.removed", i, "not removed", rule):
                return
            taken, saved, count = taken + maxima[i], saved + int(facts.tokens[i]), count + 1
        elif not over and fits and facts.config.rho is None:
            # Row maxima add up to at least what any row loses. Caps of single rows may be lower than the largest.
            room = caps if facts.one_cap is not None else facts.caps.min()
            certain = bool((taken + maxima[i] <= room - 1e-6).all())
            if not found.require(not certain, f"{path}.removed", f"without {i}", f"with {i}", rule):
                return


def check_maxima(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> None:
    """Row maxima per head and chunk, against every mean and sum of the same masses."""
    heads, k, rows = facts.record.model.query_heads, len(facts.tokens), len(facts.rows)
    maxima = np.array(trial.row_max)
    if not found.expect(f"{path}.row_max", list(maxima.shape), [heads, k], "one number per head and chunk"):
        return
    low, high = maxima.min(initial=0.0), maxima.max(initial=0.0)
    found.require(low >= 0.0 and high <= 1.0 + 1e-4, f"{path}.row_max", [low, high], "in [0, 1]", "masses")
    total = maxima.sum(axis=1)
    found.between(
        f"{path}.doc_mass",
        [trial.doc_mass],
        [float(total.mean()) / rows],
        [float(total.mean())],
        "a mean over rows, of their maxima",
    )
    if not trial.pooled_mass or len(trial.head_weights) != heads:
        return
    weighted = np.array(trial.head_weights) @ maxima / facts.record.model.kv_heads
    found.between(
        f"{path}.pooled_mass",
        list(trial.pooled_mass),
        (weighted / rows).tolist(),
        weighted.tolist(),
        "a mean over rows, of their maxima",
    )
    gone = maxima[:, list(trial.removed)]
    found.between(
        f"{path}.max_discarded_per_head",
        list(trial.max_discarded_per_head),
        gone.max(axis=1, initial=0.0).tolist(),
        gone.sum(axis=1).tolist(),
        "a row loses no less than its largest removed chunk, and no more than the maxima of all",
    )


def check_dual(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> None:
    """The dual bound, from its prices (section 5): any prices give a bound."""
    dual = trial.dual
    if dual is None:
        return
    heads, k, rows = facts.record.model.query_heads, len(facts.tokens), len(facts.rows)
    prices = dual.prices
    good = all(0 <= head < heads and 0 <= row < rows and price > 0.0 for head, row, price in prices) and dual.t >= 0.0
    good &= all(one[:2] < other[:2] for one, other in pairwise(prices))
    found.require(good, f"{path}.prices", prices, "ascending heads and rows", "prices are positive, one for each row")
    found.expect(f"{path}.k_max", dual.k_max, facts.k_max, "K = min(removable chunks, chunks - m0)")
    if not good or not found.expect(f"{path}.chunk_cost", len(dual.chunk_cost), k, "one cost per chunk"):
        return
    charged = sum(price * float(facts.caps[row]) for _, row, price in prices)
    if facts.config.rho is None:
        found.expect(f"{path}.cap_cost", dual.cap_cost, charged, "the sum of y * eps_row")
    else:
        found.between(f"{path}.cap_cost", [dual.cap_cost], [0.0], [charged], "the sum of y * eps_row, or less")
    if trial.row_max and len(trial.row_max) == heads:
        most = sum((price * np.array(trial.row_max[head]) for head, _, price in prices), np.zeros(k))
        found.between(
            f"{path}.chunk_cost", list(dual.chunk_cost), [0.0] * k, most.tolist(), "the sum of y * m, m at most row_max"
        )
    follows = dual_value(dual.cap_cost, dual.chunk_cost, dual.t, facts.tokens, facts.removable, facts.k_max)
    found.expect(f"{path}.bound", dual.bound, float(follows), "U(y, t), rounded down")
    found.expect(f"{path}.gap", dual.gap, dual.bound - trial.tokens_saved, "the bound less the tokens saved")
    found.require(
        dual.bound >= trial.tokens_saved, f"{path}.bound", dual.bound, f"at least {trial.tokens_saved}", "weak duality"
    )
