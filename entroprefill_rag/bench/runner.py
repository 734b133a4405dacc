"""One method on one question: choose, prefill, decode, and measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from entroprefill_rag.bench import scoring
from entroprefill_rag.bench.budget import kept_within
from entroprefill_rag.bench.compressor import Compressor
from entroprefill_rag.bench.methods import Method
from entroprefill_rag.bench.questions import Question
from entroprefill_rag.bench.rankers import Ranker, seed_of
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.engine.families import shape_of
from entroprefill_rag.record import GenerationResult
from entroprefill_rag.request import RagRequest
from entroprefill_rag.rule.cost import kv_bytes_per_layer

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend

PEAK_LEFT_OUT = (
    "Peak memory is left out on this device: a process gives freed memory back late or never, so its resident size "
    "cannot be told apart by method. On CUDA it is torch's largest allocation during the method."
)


@dataclass(frozen=True)
class Heard:
    """What the model said: its text, and the log-probabilities of its first token ``[V]``."""

    text: str
    first: Tensor


@dataclass(frozen=True)
class Outcome:
    """Fields of a row, and what to compare with the full run; ``heard`` is None where nothing was said."""

    told: dict[str, Any]
    heard: Heard | None


class FirstToken(LogitsProcessor):
    """Keeps the first token's distribution and changes nothing."""

    def __init__(self) -> None:
        self.logits: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the first call's scores ``[1, V]``."""
        if self.logits is None:
            self.logits = scores[0].detach().float().cpu()
        return scores


class Runner:
    """Runs methods with one model.

    Args:
        backend: the model.
        rankers: by the name in `Method.ranker`.
        compressor: made when first needed; may raise.
        budget: share of the chunk tokens that may be kept.
        max_new_tokens: longest answer.
        seed: of random chunks and of the audits' draws.
    """

    def __init__(
        self,
        backend: LocalBackend,
        rankers: Mapping[str, Ranker],
        *,
        compressor: Callable[[], Compressor] | None = None,
        budget: float = 0.5,
        max_new_tokens: int = 32,
        seed: int = 0,
    ) -> None:
        self.backend = backend
        self._rankers, self._budget, self._new, self._seed = rankers, budget, max_new_tokens, seed
        self._compressor = compressor
        self._shape = shape_of(backend.model, backend.anatomy)

    @cached_property
    def compressor(self) -> Compressor:
        """The token-level compressor."""
        if self._compressor is None:
            raise LookupError("this run was made without a compressor")
        return self._compressor()

    def run(self, method: Method, question: Question) -> Outcome:
        """Answer a question by a method. Never raises but for an interrupt: a failure is an outcome."""
        told: dict[str, Any] = {
            "question": question.id,
            "set": question.set,
            "method": method.name,
            "settings": method.digest,
            "answerable": bool(question.answers),
            "gold": len(question.gold),
            "chunks": len(question.chunks),
        }
        if method.kind == "oracle" and not question.gold:
            return Outcome({**told, "status": "skipped", "message": "The question has no gold chunk."}, None)
        cuda = self.backend.model.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            found, heard = self._answered(method, question)
        except Exception as error:  # a method that fails is counted, whatever it raises
            first = (str(error).strip().splitlines() or [""])[0][:200]
            return Outcome({**told, "status": "failed", "message": f"{type(error).__name__}: {first}"}, None)
        told |= found
        if cuda:
            told["peak_bytes"] = torch.cuda.max_memory_allocated()
        return Outcome(told, heard)

    # -- ways to answer -------------------------------------------------------------------------------------------

    def _answered(self, method: Method, question: Question) -> tuple[dict[str, Any], Heard]:
        begun = time.perf_counter()
        seed = seed_of(self._seed, "audit", question.set, question.id, method.name)
        select, before = 0.0, 0
        kept: tuple[str, ...] | None = None
        request, config = question.request(), PruningConfig(enabled=False)
        if method.kind == "pruned":
            config = method.seeded(seed)
        elif method.kind != "full":
            lengths = self._lengths(question)  # the budget's affair, not the method's: a user knows them from the store
            started = time.perf_counter()
            if method.kind == "compressed":
                request = self.compressor.request(question)
            else:
                kept, before = self._kept(method, question, seed, lengths)
                request = question.request(kept)
            select = time.perf_counter() - started
        result, heard = self._generated(request, config)
        total = time.perf_counter() - begun
        kept = result.retained_ids if kept is None and method.kind != "compressed" else kept
        return {
            **self._quality(question, heard.text),
            **self._chunks(question, kept, result),
            **self._cost(method, result, select, before),
            **_decision(method, result),
            "total": total,
        }, heard

    def _kept(
        self, method: Method, question: Question, seed: int, lengths: tuple[int, ...]
    ) -> tuple[tuple[str, ...], int]:
        """Ids of the chunks of the short prompt, and tokens x layers that choosing them took."""
        ids = tuple(chunk.id for chunk in question.chunks)
        if method.kind == "none":
            return (), 0
        if method.kind == "oracle":
            return tuple(name for name in ids if name in question.gold), 0
        if method.kind == "second_pass":
            pruned = self.backend.prune(question.request(), method.seeded(seed))
            layers = method.config.layers
            depth = layers[-1] if isinstance(layers, tuple) else len(self.backend.anatomy.layers) - 1
            return pruned.retained_ids, pruned.audit.prompt.tokens * (depth + 1)
        scores = self._rankers[method.ranker].scores(question)
        return tuple(ids[i] for i in kept_within(scores, lengths, self._budget)), 0

    def _generated(self, request: RagRequest, config: PruningConfig) -> tuple[GenerationResult, Heard]:
        first = FirstToken()
        result = self.backend.generate(
            request,
            config,
            max_new_tokens=self._new,
            do_sample=False,
            logits_processor=LogitsProcessorList([first]),
        )
        if first.logits is None:
            raise RuntimeError("the model generated no token")
        return result, Heard(result.answer, first.logits.log_softmax(dim=-1))

    def _lengths(self, question: Question) -> tuple[int, ...]:
        """Tokens of every chunk in the full prompt."""
        return self.backend.layout(question.request(), max_new_tokens=self._new).chunk_tokens

    # -- what is measured -----------------------------------------------------------------------------------------

    def _quality(self, question: Question, text: str) -> dict[str, Any]:
        return {
            "found": scoring.found(text, question.answers),
            "f1": scoring.token_f1(text, question.answers),
            "declines": scoring.declines(text),
        }

    def _chunks(self, question: Question, kept: tuple[str, ...] | None, result: GenerationResult) -> dict[str, Any]:
        lengths = dict(zip((chunk.id for chunk in question.chunks), self._lengths(question), strict=True))
        total = max(1, sum(lengths.values()))
        if kept is None:  # tokens, not chunks, were chosen
            inside = sum(info.end - info.start for info in result.audit.prompt.chunks)
            return {"kept_share": inside / total}
        return {
            "kept": len(kept),
            "kept_share": sum(lengths[name] for name in kept) / total,
            "gold_kept": len(question.gold.intersection(kept)),
            "need_met": scoring.need_met(kept, question.gold, question.need),
        }

    def _cost(self, method: Method, result: GenerationResult, select: float, before: int) -> dict[str, Any]:
        usage, timings, depth = result.usage, result.timings, self._shape.layers
        layer = result.audit.accepted_layer
        split = depth - 1 if layer is None else layer
        n, kept = usage.prompt_tokens, usage.kept_tokens
        return {
            "seconds": {
                "select": select,
                **{name: getattr(timings, name) for name in ("layout", "wait", "shallow", "rule", "deep")},
            },
            "ttft": select + timings.first_token,
            "prompt_tokens": n,
            "generated_tokens": usage.generated_tokens,
            # What a compressor runs through the model is its own affair, and not counted by it.
            "token_layers": None
            if method.kind == "compressed"
            else before + n * (split + 1) + kept * (depth - split - 1),
            "kv_bytes": sum(kv_bytes_per_layer(self._shape, tokens=n, kept=kept, layer=split)),
        }


def _decision(method: Method, result: GenerationResult) -> dict[str, Any]:
    if method.kind != "pruned":
        return {}
    record = result.audit
    verdicts: dict[str, int] = {}
    for trial in record.trials:
        verdicts[trial.verdict.code] = verdicts.get(trial.verdict.code, 0) + 1
    return {
        "outcome": record.outcome,
        "layer": record.accepted_layer,
        "reason": record.reason.code,
        "verdicts": verdicts,
    }


def agreement(full: Heard | None, other: Heard | None) -> dict[str, Any]:
    """How near a run is to the full one; nothing where one of them failed."""
    if full is None or other is None:
        return {}
    p, q = full.first.double(), other.first.double()
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), torch.zeros_like(p))
    return {
        "same_text": full.text == other.text,
        "same_first": int(p.argmax()) == int(q.argmax()),
        "kl": max(0.0, float(terms.sum())),
    }
