"""What one question shows: every monitorable layer under several caps, the audits' truth, and the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from entroprefill_rag import AuditConfig, Chunk, LocalBackend, PruningConfig, RagRequest
from entroprefill_rag.diagnosis import diagnose
from entroprefill_rag.engine import families
from entroprefill_rag.errors import EntroPrefillError
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.rule.audit import plan_audit
from entroprefill_rag.rule.betting import log_wealth_needed, log_wealth_path
from entroprefill_rag.rule.bounds import BOUNDS, recheck
from entroprefill_rag.rule.concentration import empirical_bernstein_upper
from entroprefill_rag.rule.dual import dual_bound
from entroprefill_rag.rule.masses import RowMasses
from entroprefill_rag.rule.proposal import PROPOSED, Proposal, Proposer
from entroprefill_rag.rule.removal import exact_removal, greedy_removal

Floats = NDArray[np.float64]

CAPS = (0.1, 0.2, 0.3, 0.5)
DELTA = 0.05
DRAWS = 128
SEEDS = 200
NEW_TOKENS = 32


def request_of(question: dict[str, Any]) -> RagRequest:
    """A labelled question as a request."""
    chunks = [Chunk(id=part["id"], text=part["text"], title=part.get("title") or "") for part in question["chunks"]]
    return RagRequest(chunks=chunks, query=question["question"])


def config_at(cap: float) -> PruningConfig:
    """The defaults with one number for the rows' cap and the audit's limit, and the paper's head weights."""
    return PruningConfig(head_weights="renyi", eps_row=cap, audit=AuditConfig(eps_audit=cap, delta=DELTA))


class EveryLayer:
    """Looks at all monitorable layers and accepts none; keeps what each cap would have done there.

    Args:
        layout: the prompt.
        backend: the model.
        gold: positions of the gold chunks.
        seed: of the simulated draws.
    """

    def __init__(self, layout: PromptLayout, backend: LocalBackend, gold: Sequence[int], seed: int) -> None:
        anatomy = backend.anatomy
        block = (layout.chunk_spans[0][0], layout.chunk_spans[-1][1])
        able = families.monitorable(anatomy, block, layout.n_tokens)
        self.layers = tuple(layer for layer in able if layer >= len(anatomy.layers) // 6)
        self._default = families.default_layers(anatomy, able)
        self._heads = anatomy.query_heads
        self._layout, self._gold, self._block = layout, set(gold), block
        self._random = np.random.default_rng(seed)
        self._proposers = {cap: Proposer(config_at(cap), layout, anatomy.kv_heads) for cap in CAPS}
        self.seen: list[dict[str, Any]] = []

    def observe(self, layer: int, read: Any) -> Any:
        """Measure one layer; accept nothing."""
        first = next(iter(self._proposers.values()))
        rows: RowMasses = read(first.rows, True)
        observers = np.concatenate([np.arange(*self._block), np.arange(*self._layout.suffix_span)])
        every = read(torch.from_numpy(observers), False).chunks.numpy()
        for cap, proposer in self._proposers.items():
            self.seen.append(self._one(layer, cap, proposer.propose(layer, rows), every, observers))
        return _TurnedDown()

    def _one(self, layer: int, cap: float, proposal: Proposal, every: Floats, observers: NDArray[np.int64]) -> Any:
        trial = proposal.trial
        found: dict[str, Any] = {
            "layer": layer,
            "cap": cap,
            "verdict": trial.verdict.code,
            "doc_mass": trial.doc_mass,
            "saved_share": trial.saved_share,
            "removed": len(trial.removed),
            "chunks": len(self._layout.chunk_spans),
            "gold_kept": None if not self._gold else 1 - len(self._gold & set(trial.removed)) / len(self._gold),
        }
        if trial.verdict.code != PROPOSED or proposal.problem is None:
            return found
        lost = self._lost(trial.removed, every, observers)
        found |= {
            "max_discarded": trial.max_discarded,
            "envelope": trial.envelope,
            "envelope_per_head": max(trial.envelope_per_head),
            "eta": float(lost.mean(axis=1).max()),
            "eta_worst_row": float(lost.max()),
            "accepted": self._accepted(layer, cap, lost),
        }
        if layer in self._default:
            if cap == 0.2:
                found["solver"] = _solvers(proposal)
            found["audits"] = self._audits(lost, cap)
        return found

    def _lost(self, removed: Sequence[int], every: Floats, observers: NDArray[np.int64]) -> Floats:
        """``[H_Q, support]`` what every prompt row places on the removed chunks; 0 where the row itself is removed."""
        lost = every[..., list(removed)].sum(axis=-1)
        gone = np.concatenate([np.arange(*self._layout.chunk_spans[chunk]) for chunk in removed])
        lost[:, np.isin(observers, gone)] = 0.0
        return np.clip(lost, 0.0, 1.0)

    def _accepted(self, layer: int, cap: float, lost: Floats) -> bool:
        """The verdict of the default audit at this layer, with draws of its own."""
        audit = plan_audit(
            config_at(cap).audit,
            document_block=self._block,
            suffix=self._layout.suffix_span,
            layers=len(self._default),
            heads=self._heads,
            seed=int(self._random.integers(2**53)),
            prompt_hash=f"{self._layout.hash}/{layer}",
        )
        support = np.concatenate([np.arange(*self._block), np.arange(*self._layout.suffix_span)])
        at = np.searchsorted(support, audit.looked)
        allowed = np.ones(len(audit.looked))
        return all(audit.judge(plan, lost[:, at], tokens_removed=0, allowed=allowed).accepted for plan in audit.plans)

    def _audits(self, lost: Floats, cap: float) -> dict[str, Any]:
        """How often each bound accepts, over many draws, against the exact mean over all rows.

        ``false``: the limit just below the worst head's true mean, that head alone at the full delta: each acceptance
        is false, and the rate may not exceed delta. ``union``: the same limit, all heads, the union over layers and
        heads. ``power``: the limit ``cap``, where every head's true mean is at most half of it; None elsewhere.
        """
        eta = lost.mean(axis=1)
        worst = int(eta.argmax())
        limit = float(eta[worst]) * (1 - 1e-9)
        level = DELTA / (len(self._default) * self._heads)
        found: dict[str, Any] = {"eta": float(eta[worst])}
        drawn = lost[:, self._random.integers(lost.shape[1], size=(SEEDS, DRAWS))].transpose(1, 0, 2)
        for bound in BOUNDS:
            rates: dict[str, float | None] = {"false": None, "union": None, "power": None}
            if 1e-4 < limit < 1.0:
                rates["false"] = float(np.mean([passes(bound, one[[worst]], limit, DELTA) for one in drawn]))
                rates["union"] = float(np.mean([passes(bound, one, limit, level) for one in drawn]))
            if eta[worst] <= cap / 2:
                rates["power"] = float(np.mean([passes(bound, one, cap, level) for one in drawn]))
            found[bound] = rates
        return found


class _TurnedDown:
    accepted = False


def passes(bound: str, losses: Floats, eps: float, level: float) -> bool:
    """Whether every head passes; the decision alone, without inverting the bound."""
    mean, m = losses.mean(axis=1), losses.shape[1]
    if bound == "betting":
        return bool((log_wealth_path(losses, eps).max(axis=1) >= log_wealth_needed(level)).all())
    if bound == "empirical_bernstein":
        return bool((empirical_bernstein_upper(mean, losses.var(axis=1, ddof=1), m, level) <= eps).all())
    return bool(recheck(bound, eps=eps, level=level, m=m, eta_hat=mean, upper=mean).all())


def _solvers(proposal: Proposal) -> dict[str, Any]:
    """Greedy beside the exact programme, for both objectives: least pooled mass at the target; most tokens."""
    problem, trial = proposal.problem, proposal.trial
    if problem is None:
        raise ValueError("nothing was solved at this layer")
    scores, pooled = np.array(trial.scores), np.array(trial.pooled_mass)
    exact = exact_removal(problem, scores, pooled, seconds=5.0)
    open_ended = replace(problem, target_tokens=int(problem.tokens.sum()), max_tokens=int(problem.tokens.sum()))
    greedy_most = greedy_removal(open_ended, scores)
    most = exact_removal(open_ended, scores, pooled, seconds=5.0, objective="tokens")
    dual = dual_bound(open_ended, greedy_most.tokens_saved, seconds=5.0)
    return {
        "greedy_mass": float(pooled[list(trial.removed)].sum()),
        "exact_mass": float(pooled[list(exact.removed)].sum()),
        "greedy_saved": trial.tokens_saved,
        "exact_saved": exact.tokens_saved,
        "solver": exact.solver,
        "greedy_most": greedy_most.tokens_saved,
        "exact_most": most.tokens_saved,
        "dual": dual.bound,
    }


def answers(backend: LocalBackend, request: RagRequest, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answer in full, then under each cap."""

    def found(text: str) -> bool | None:
        wanted = question.get("answers") or []
        return any(answer.lower() in text.lower() for answer in wanted) if wanted else None

    full = None
    for cap in (None, *CAPS):
        config = PruningConfig(enabled=False) if cap is None else config_at(cap)
        result = backend.generate(request, config, max_new_tokens=NEW_TOKENS, do_sample=False)
        full = full if full is not None else result.answer
        record = result.audit
        yield {
            "cap": cap,
            "outcome": record.outcome,
            "reason": record.reason.code,
            "layer": record.accepted_layer,
            "saved_share": record.trial.saved_share if record.outcome == "pruned" and record.trial else 0.0,
            "found": found(result.answer),
            "same_text": result.answer == full,
            "dropped": list(result.dropped_ids),
        }


def measure(backend: LocalBackend, question: dict[str, Any], seed: int) -> dict[str, Any]:
    """Everything the study wants of one question, as JSON data. Holds ids and numbers, no text."""
    request = request_of(question)
    layout = backend.layout(request)
    gold = [layout.chunk_ids.index(chunk) for chunk in question["gold_chunk_ids"] if chunk in layout.chunk_ids]
    watcher = EveryLayer(layout, backend, gold, seed)
    backend.watch(layout, watcher)
    told: dict[str, Any] = {
        "id": question["id"],
        "source": question.get("source"),
        "tokens": layout.n_tokens,
        "chunks": len(layout.chunk_spans),
        "gold": question["gold_chunk_ids"],
        "layers": watcher.seen,
        "answers": list(answers(backend, request, question)),
        "diagnosis": None,
    }
    with suppress(EntroPrefillError):
        told["diagnosis"] = _diagnosis(backend, request, watcher)
    return told


def _diagnosis(backend: LocalBackend, request: RagRequest, watcher: EveryLayer) -> dict[str, Any] | None:
    """Full against pruned, under the defaults where a layer is accepted, else at the layer that saves most."""
    config = config_at(0.2)
    found = diagnose(backend, request, config)
    if found.layer is None:
        proposed = [one for one in watcher.seen if one["cap"] == 0.2 and one["verdict"] == PROPOSED]
        proposed = [one for one in proposed if one["layer"] in watcher._default] or proposed
        if not proposed:
            return None
        best = max(proposed, key=lambda one: one["saved_share"])
        found = diagnose(backend, request, config, layer=best["layer"])
        if found.layer is None:
            return None
    return {
        "layer": found.layer,
        "forced": found.forced,
        "retained_share": found.retained / found.tokens,
        "holds": found.fixed_rows_hold,
        "next": found.next_token.model_dump() if found.next_token else None,
        "vacuous": found.next_token.vacuous if found.next_token else None,
        "best_bound": found.next_token.best_bound if found.next_token else None,
        "rows": found.rows(),
    }
