"""A tiny model with the engine on it, and decisions forced on the engine: what the matrix runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from families_for_tests import FAMILIES, Family, build, shared
from oracle import reference_logits
from torch import LongTensor, Tensor
from transformers import DynamicCache, PreTrainedModel

from entroprefill_rag.engine.install import Installation
from entroprefill_rag.engine.run import PrefillRun

STEPS = 8


@dataclass(frozen=True)
class Verdict:
    """What the engine asks of a decision."""

    accepted: bool
    removed: tuple[int, ...] = ()
    kept_tokens: LongTensor | None = None


@dataclass
class ForcedDecision:
    """Stands where the monitor does, and removes what it was told to.

    Attributes:
        layer: after which to remove; None watches ``layers`` and accepts at none of them.
        removed: positions of the tokens to remove.
        n: length of the prompt.
        layers: monitored layers.
        rows: rows to read at each of them, if any.
        masses: per layer, what reading them gave.
    """

    layer: int | None
    removed: Sequence[int]
    n: int
    layers: tuple[int, ...] = ()
    rows: LongTensor | None = None
    masses: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers and self.layer is not None:
            self.layers = (self.layer,)

    def observe(self, layer: int, read: Callable[[Tensor, bool], Any]) -> Verdict:
        if self.rows is not None:
            self.masses[layer] = read(self.rows, True)
        if layer != self.layer:
            return Verdict(accepted=False)
        gone = set(self.removed)
        kept = torch.tensor([position for position in range(self.n) if position not in gone])
        return Verdict(accepted=True, kept_tokens=kept)


@dataclass(frozen=True)
class Outcome:
    """Greedy tokens and the logits each was chosen from, ``[steps, vocabulary]``."""

    tokens: list[int]
    logits: Tensor


@dataclass
class Subject:
    """One model twice: with the engine installed, and untouched for the reference."""

    name: str
    kernel: str
    family: Family
    model: PreTrainedModel
    untouched: PreTrainedModel
    installation: Installation

    def decision(self, layer: int, removed: Sequence[int], n: int) -> ForcedDecision:
        return ForcedDecision(layer, removed, n)

    @contextmanager
    def running(self, decision: ForcedDecision | None, n: int) -> Iterator[PrefillRun]:
        """An active run; with it every single token is a chunk of its own, so that the tap shows them all."""
        run = PrefillRun(self.installation.anatomy, n, decision, torch.eye(n))
        with self.installation.activate(run):
            yield run

    def generate(
        self, ids: Sequence[int], decision: ForcedDecision | None, *, padding: int = 0, steps: int = STEPS
    ) -> Outcome:
        """The prompt through ``generate`` of the model with the engine: ``1 + steps`` greedy tokens."""
        with self.running(decision, len(ids)) as run:
            outcome = greedy(self.model, ids, padding=padding, steps=steps)
        assert run.refusal is None, run.refusal
        return outcome

    def reference(
        self, sequence: Sequence[int], n_prompt: int, decision: ForcedDecision, *, padding: int = 0
    ) -> Tensor:
        """Logits of the oracle that follow the prompt and each later token of ``sequence``."""
        layer = len(self.family.windows) if decision.layer is None else decision.layer
        return reference_logits(
            self.untouched, sequence, self.family.windows, layer, decision.removed, n_prompt, padding
        )


def subject(name: str, kernel: str) -> Subject:
    """Build the model ``name`` with ``kernel`` and install the engine on it; the caller closes the installation."""
    model = build(name, kernel)
    return Subject(name, kernel, FAMILIES[name], model, shared(name, kernel), Installation(model))


def greedy(model: PreTrainedModel, ids: Sequence[int], *, padding: int = 0, steps: int = STEPS) -> Outcome:
    """Plain greedy ``generate`` of transformers."""
    output = model.generate(
        torch.tensor([list(ids)]),
        attention_mask=torch.tensor([[0] * padding + [1] * (len(ids) - padding)]),
        max_new_tokens=1 + steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Outcome(output.sequences[0, len(ids) :].tolist(), torch.cat(output.logits))


def forward(
    model: PreTrainedModel, ids: Sequence[int], cache: DynamicCache, *, start: int = 0, padding: int | None = None
) -> Tensor:
    """One forward of the causal model on a cache.

    Args:
        start: index of the first of ``ids`` in the whole sequence.
        padding: leading pad tokens of the whole sequence; None passes no mask at all.

    Returns:
        Logits of the positions computed, ``[positions, vocabulary]``.
    """
    # The keyword was renamed between the releases of transformers that are supported.
    takes = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"cache" if "cache" in takes else "past_key_values": cache}
    if padding is not None:
        end = start + len(ids)
        arguments["attention_mask"] = torch.tensor([[0] * padding + [1] * (end - padding)])
        arguments["position_ids"] = torch.tensor([[max(0, index - padding) for index in range(start, end)]])
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=True, **arguments).logits[0]


def relative_difference(left: Tensor, right: Tensor) -> float:
    """Largest difference of two sets of logits, as a share of the largest logit."""
    return float((left - right).abs().max() / right.abs().max())
