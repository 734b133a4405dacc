"""What one layer proposes (sections 3 to 5): rows of attention -> head weights -> scores -> a removed set, or why none.

Nothing here knows the audit's draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entroprefill_rag.config import HeadProfile, PruningConfig
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.record import LayerTrial, Reason
from entroprefill_rag.rule.audit import significant
from entroprefill_rag.rule.evidence import Evidence, EvidenceRows
from entroprefill_rag.rule.losses import RowReader
from entroprefill_rag.rule.masses import RowMasses, chunk_positions, document_mass
from entroprefill_rag.rule.pooling import pool_heads, pooled_chunks, pooled_tokens
from entroprefill_rag.rule.removal import (
    Removal,
    RemovalProblem,
    effective_caps,
    exact_removal,
    greedy_removal,
    row_caps,
    within_reach,
)
from entroprefill_rag.rule.scoring import chunk_scores, concentrations, evidence_scores, relative_masses
from entroprefill_rag.rule.stability import envelope, envelope_per_head

Floats = NDArray[np.float64]

PROPOSED = "proposed"
NOTHING_FITS = {
    "all": "No removable chunk fits under the caps of every head and row and under max_saving.",
    "target": "None of the chunks that rank lowest fits under the caps of every head and row and under max_saving.",
}
"""By `reach`: why a layer's set is empty."""


@dataclass(frozen=True)
class Proposal:
    """What a layer proposes.

    Attributes:
        trial: its verdict's code is ``PROPOSED`` where there is a set to go on with.
        masses: ``[H_Q, W_p, k]`` of the proposal rows.
        problem: what was solved; None where the layer was rejected before.
    """

    trial: LayerTrial
    masses: Floats
    problem: RemovalProblem | None = None


def proposal_rows(suffix: tuple[int, int], most: int) -> Tensor:
    """Positions of the proposal rows: the last of the suffix, at most ``most`` and at most half of it, at least one."""
    start, end = suffix
    return torch.arange(end - max(1, min(most, (end - start) // 2)), end, device="cpu")


class Proposer:
    """The numbers of one request that every layer's proposal shares.

    Args:
        config: what may be removed and under which limits.
        layout: the prompt.
        groups: GQA groups ``G``.

    Attributes:
        rows: LongTensor, positions of the proposal rows.
        caps: ``[W_p]`` absolute caps of these rows.
        tokens: ``[k]`` chunk lengths.
        removable: ``[k]``.
    """

    def __init__(self, config: PruningConfig, layout: PromptLayout, groups: int) -> None:
        self._config, self._groups = config, groups
        self.rows = proposal_rows(layout.suffix_span, config.proposal_rows)
        self.caps = row_caps(config.eps_row, len(self.rows))
        self.tokens = np.array(layout.chunk_tokens, dtype=np.int64)
        self.removable = np.array(layout.removable, dtype=np.bool_)
        total = int(self.tokens.sum())
        # The 1e-9 takes back what a product of floats adds: 0.1 * 30 tokens are 3 tokens, not 4.
        self._least = ceil(config.min_saving * total - 1e-9)
        self._most = floor(config.max_saving * total + 1e-9)
        self._target = min(ceil(config.target_saving * total - 1e-9), self._most)
        self._evidence_rows = EvidenceRows.of(layout, self.rows)
        self._chunk_positions, self._owner = chunk_positions(layout.chunk_spans, first=layout.sink_tokens)
        outside_sinks = np.arange(layout.sink_tokens, layout.n_tokens, dtype=np.int64)
        self._region = self._chunk_positions if config.entropy_over == "documents" else outside_sinks
        profile = config.head_weights if isinstance(config.head_weights, HeadProfile) else None
        self._evidence = Evidence(profile if config.evidence == "auto" else None, config.mu_min)

    def evidence_layers(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Layers whose rows rank chunks at one of these, ascending; these themselves may be among them."""
        return self._evidence.layers(layers)

    def note(self, layer: int, read: RowReader) -> None:
        """Keep what a layer's rows show for the order of removal at it and at later ones.

        Args:
            layer: its index.
            read: reads rows of this layer: those of the question and before it.
        """
        masses = read(self._evidence_rows.rows, False).chunks.double().numpy()
        self._evidence.note(layer, *self._evidence_rows.means(masses))

    def why_not(self) -> Reason | None:
        """Why this prompt can have no removed set, whatever its attention; None where it may."""
        k, m0 = len(self.tokens), self._config.m0
        if not k:
            return Reason(code="no_chunks", message="The prompt holds no chunk: there is nothing to remove.")
        if not self.removable.any():
            return Reason(code="nothing_removable", message=f"All {k} chunks are protected.")
        if k <= m0:
            return Reason(code="too_few_chunks", message=f"At least m0 = {m0} chunks must stay, and there are {k}.")
        may_go = np.sort(self.tokens[self.removable])[::-1]
        reach = min(int(may_go[: k - m0].sum()), self._most)
        if reach < self._least or may_go[-1] > self._most:
            return Reason(
                code="saving_out_of_reach",
                message=f"Chunks that may go save at most {reach} tokens in steps of at least {may_go[-1]}, within "
                f"{self._least} (min_saving) and {self._most} (max_saving) of {self.tokens.sum()}.",
            )
        return None

    def propose(self, layer: int, rows: RowMasses) -> Proposal:
        """What a layer proposes.

        Args:
            layer: its index.
            rows: masses of the proposal rows, with the mean row per token.
        """
        if rows.tokens is None:
            raise ValueError("the proposal needs the mean row per token; read the proposal rows with tokens=True")
        config, groups = self._config, self._groups
        masses, mean_rows = rows.chunks.double().numpy(), rows.tokens.numpy()
        heads = len(masses)
        if not (np.isfinite(masses).all() and np.isfinite(mean_rows).all()):
            verdict = Reason(code="not_finite", message=f"Layer {layer}: attention rows hold NaN or infinity.")
            even = (groups / heads,) * heads
            trial = LayerTrial(
                layer=layer, doc_mass=0.0, eligible_heads=0, fallback_groups=groups, head_weights=even, verdict=verdict
            )
            return Proposal(trial, np.zeros_like(masses))
        pooling = pool_heads(
            mean_rows,
            self._region,
            groups=groups,
            mu_min=config.mu_min,
            tau=config.tau,
            zeta=config.zeta,
            kind=config.head_weights,
            layer=layer,
        )
        mass = document_mass(rows.chunks)
        seen: dict[str, Any] = {
            "layer": layer,
            "doc_mass": significant([mass])[0],
            "eligible_heads": pooling.deciding_heads,
            "fallback_groups": pooling.fallback_groups,
            "head_weights": significant(pooling.weights),
            "weighting": pooling.weighting,
        }
        if mass < config.mass_min:
            message = f"Mean mass on the documents is {mass:.4f}, below mass_min = {config.mass_min:g}."
            return Proposal(LayerTrial(**seen, verdict=Reason(code="no_document_mass", message=message)), masses)
        evidence = self._evidence.at(layer)
        if pooling.all_fall_back and evidence is None:
            which = "No head" if pooling.picked is None else "No head that the profile picks"
            most = (pooling.region_mass if pooling.picked is None else pooling.region_mass[pooling.picked]).max()
            message = (
                f"{which} places mu_min = {config.mu_min:g} of its attention on the region {config.entropy_over!r}; "
                f"the most is {most:.4f}."
            )
            return Proposal(LayerTrial(**seen, verdict=Reason(code="no_eligible_heads", message=message)), masses)
        pooled = pooled_chunks(masses, pooling.weights, groups)
        if evidence is None:
            per_token = pooled_tokens(mean_rows[:, self._chunk_positions], pooling.weights, groups)
            scores = chunk_scores(
                relative_masses(pooled, self.tokens, config.alpha),
                concentrations(per_token, self._owner, len(self.tokens)),
                config.lam,
            )
        else:
            seen["evidence"] = significant(evidence)
            scores = evidence_scores(evidence, self.tokens)
        problem = RemovalProblem(
            masses=masses,
            caps=effective_caps(self.caps, masses, pooling.eligible, config.rho),
            tokens=self.tokens,
            removable=self.removable,
            m0=config.m0,
            target_tokens=self._target,
            max_tokens=self._most,
        )
        able = problem
        if config.reach == "target":
            able = replace(problem, removable=within_reach(problem, scores))
        if config.solver == "exact":
            removal = exact_removal(able, scores, pooled, seconds=config.solver_seconds)
        else:
            removal = greedy_removal(able, scores)
        seen |= {"pooled_mass": significant(pooled), "scores": significant(scores)}
        return Proposal(self._judged(seen, problem, removal, pooled, pooling.weights), masses, problem)

    def _judged(
        self, seen: dict[str, Any], problem: RemovalProblem, removal: Removal, pooled: Floats, weights: Floats
    ) -> LayerTrial:
        """The trial of a solved layer: what the set saves and loses, and whether it saves enough."""
        lost = problem.discarded(removal.removed)
        q = float(pooled[list(removal.removed)].sum())
        rows = len(self.rows)
        worst = envelope(q, rows=rows, query_heads=len(weights), zeta=self._config.zeta)
        per_head = envelope_per_head(q, rows=rows, groups=self._groups, weights=weights)
        share = removal.tokens_saved / max(int(self.tokens.sum()), 1)
        verdict = Reason(code=PROPOSED, message="")
        if not removal.removed:
            verdict = Reason(code="caps_leave_nothing", message=NOTHING_FITS[self._config.reach])
        elif removal.tokens_saved < self._least:
            message = (
                f"The set saves {share:.1%} of the chunk tokens, below min_saving = {self._config.min_saving:.1%}."
            )
            verdict = Reason(code="below_min_saving", message=message)
        return LayerTrial(
            **seen,
            removed=removal.removed,
            stopped=removal.stopped,
            solver=removal.solver,
            tokens_saved=removal.tokens_saved,
            saved_share=significant([share])[0],
            max_discarded=significant([lost.max()])[0],
            max_discarded_per_head=significant(lost.max(axis=1)),
            max_discarded_per_row=significant(lost.max(axis=0)),
            cap_slack=significant([(problem.caps - lost).min()])[0],
            pooled_discarded=significant([q])[0],
            envelope=significant([worst])[0],
            envelope_per_head=significant(per_head),
            verdict=verdict,
        )
