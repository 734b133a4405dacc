"""Probe queries: other questions over the same documents, each run as a branch of the prompt (correction 8).

A probe's prompt is the prompt with another question: the same tokens up to the end of the documents, then a suffix of
its own, laid out like any other. Causal attention gives the tokens they share the same keys and values in both, so the
branch computes the probe's suffix only, on what the prompt's own forward has just worked out, through layers ``0..l``.
It never sees the user's question. At layer ``l`` it reads the probe's rows and stops.

Several probes run side by side in one forward under a mask that hides them from each other.

**Cost.** With ``B`` distinct probes of ``s`` tokens each, ``n`` tokens in the prompt of which the documents end at
``P``, and ``L`` layers: the linear work of the branch is ``(B s / n) ((l + 1) / L)`` of a full prefill's. Its attention
forms ``B s (P + s)`` pairs per layer, against ``n^2 / 2``. This is paid again at each layer whose proposal reaches the
audit; extra memory is one layer's keys and values, and in filter mode those of layers ``0..l``.
Measured on SmolLM2 in float32 on a CPU (processor time): 64 probes of 31 tokens over a prompt of 994, read at layer 15
of 30, took 1.30 times what the full prefill took; the linear part of the formula says 1.07.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from entroprefill_rag.config import ProbeQueries, PruningConfig
from entroprefill_rag.engine.families import Anatomy, device_and_dtype
from entroprefill_rag.engine.layout import SegmentTokenizer, build_layout
from entroprefill_rag.engine.prompt_style import PromptStyle
from entroprefill_rag.engine.run import ForwardFinished, PrefillRun
from entroprefill_rag.engine.tap import ACTIVE_RUN, read_rows
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.record import Reason
from entroprefill_rag.request import RagRequest

# Tokens of probes in one forward: enough to keep a processor busy, few beside the prompt's own.
PACK_TOKENS = 256


@dataclass(frozen=True)
class Bank:
    """The probes that an audit may look at, as tokens.

    Attributes:
        shared: first tokens of the prompt, all that precedes its suffix: what every probe sees.
        suffixes: place in the bank -> ids of the probe's own tokens.
    """

    shared: int
    suffixes: Mapping[int, tuple[int, ...]]


def probes_for(
    request: RagRequest,
    config: PruningConfig,
    layout: PromptLayout,
    places: Sequence[int],
    *,
    anatomy: Anatomy,
    segments: SegmentTokenizer,
    style: PromptStyle,
    outputs: bool = False,
) -> Probes | Reason:
    """Lay out the probes of one request, or say why they cannot be run.

    Args:
        request: what the user asked.
        config: names the bank of questions.
        layout: the prompt.
        places: of the bank, that the audit may look at.
        anatomy: the model.
        segments: its tokenizer.
        style: how the prompt was written.
        outputs: whether the caller asked the model for hidden states or attentions of every layer.
    """
    if not anatomy.materialises_masks:
        message = (
            f"Probes are hidden from each other by a mask, which {anatomy.kernel!r} does not take; load with sdpa."
        )
        return Reason(code="probe_kernel", message=message)
    if outputs:
        message = "Hidden states or attentions were asked for, and those of the probes would be among them."
        return Reason(code="probe_outputs", message=message)
    queries = next(item.queries for item in config.audit.observers if isinstance(item, ProbeQueries))
    bank = lay_out(request, {place: queries[place] for place in places}, layout, segments, style)
    if bank is None:
        message = (
            "Laid out with another question, the prompt begins with other tokens: does its template write the time?"
        )
        return Reason(code="probe_template", message=message)
    longest = bank.shared + max(len(suffix) for suffix in bank.suffixes.values())
    most = getattr(anatomy.config, "max_position_embeddings", None)
    if most is not None and longest > most:
        message = f"With the longest probe a prompt has {longest} tokens, and the model places {most}."
        return Reason(code="probe_length", message=message)
    steady = _steady_positions(anatomy.config)
    if steady is not None and max(longest, layout.n_tokens) > steady:
        message = f"Beyond {steady} tokens this model rotates positions by the prompt's length, which probes change."
        return Reason(code="probe_length", message=message)
    return Probes(anatomy, bank)


def lay_out(
    request: RagRequest,
    queries: Mapping[int, str],
    layout: PromptLayout,
    segments: SegmentTokenizer,
    style: PromptStyle,
) -> Bank | None:
    """Tokens of the probes, by the machinery that lays out prompts: no text of theirs becomes a special token.

    Args:
        request: what the user asked.
        queries: place in the bank -> question.
        layout: the prompt.
        segments: the model's tokenizer.
        style: how the prompt was written.

    Returns:
        None where a prompt with another question does not begin like this one.
    """
    ends = (layout.input_ids[: layout.chunk_spans[0][0]], layout.input_ids[slice(*layout.suffix_span)])
    within = request
    # The suffix depends on the documents through the last of them at most; one document is quicker laid out than all.
    if filled := [chunk for chunk in request.chunks if chunk.text.strip() or chunk.title]:
        shorter = request.model_copy(update={"chunks": (filled[-1],)})
        within = shorter if _ends(shorter, segments, style) == ends else request
    suffixes = {}
    for place, query in queries.items():
        prefix, suffix = _ends(within.model_copy(update={"query": query}), segments, style)
        if prefix != ends[0]:
            return None
        suffixes[place] = suffix
    return Bank(layout.suffix_span[0], suffixes)


def _ends(
    request: RagRequest, segments: SegmentTokenizer, style: PromptStyle
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before the first chunk and after the last."""
    made = build_layout(request, segments, style=style, sink_tokens=0, max_positions=None)
    return made.input_ids[: made.chunk_spans[0][0]], made.input_ids[slice(*made.suffix_span)]


def _steady_positions(config: Any) -> int | None:
    """Tokens up to which rotation does not depend on a prompt's length; None where it never does."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = []
    for table in (given, *given.values()):
        if isinstance(table, Mapping) and table.get("rope_type", table.get("type")) in ("dynamic", "longrope"):
            named = table.get("original_max_position_embeddings")
            limits.append(
                named or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            )
    return min(limits, default=None)


class Probes:
    """Runs one request's probes; made for one prompt, used inside its forward.

    Args:
        anatomy: the model.
        bank: the probes.
    """

    def __init__(self, anatomy: Anatomy, bank: Bank) -> None:
        self._anatomy, self._bank = anatomy, bank
        self._kept: dict[int, SharedLayer] = {}
        self._cache_name = _cache_name(anatomy.decoder)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Note the keys and values ``[1, G, n, d]`` that a layer's attention works with: views, no copies."""
        shared, window = self._bank.shared, self._anatomy.windows[layer]
        # Earlier keys are out of every probe's window.
        first = 0 if window is None else max(0, shared - window + 1)
        self._kept[layer] = SharedLayer(key[:, :, first:shared], value[:, :, first:shared], shared)

    def release(self) -> None:
        """Forget all keys and values."""
        self._kept.clear()

    def read(self, layer: int, places: Tensor, membership: Tensor, cancelled: threading.Event) -> Tensor:
        """What probes place on every chunk at one layer: the mean over a probe's own rows.

        Args:
            layer: where to read; layers up to it have been noted.
            places: of the bank ``[B]``.
            membership: 0/1 float32 ``[n, k]`` of the prompt, which token belongs to which chunk.
            cancelled: leave when this is set.

        Returns:
            ``[H_Q, B, k]`` float64, on the CPU.
        """
        asked = places.tolist()
        cache = Cache(layers=[self._kept[below] for below in range(layer + 1)])
        device, _ = device_and_dtype(self._anatomy.decoder)
        parts = []
        for pack in _packs(asked, self._bank):
            suffixes = [self._bank.suffixes[place] for place in pack]
            run = ProbeRun(self._anatomy, self._bank.shared, suffixes, layer, membership)
            run.cancelled = cancelled
            ids = torch.tensor([[token for suffix in suffixes for token in suffix]], device=device)
            arguments: dict[str, Any] = {self._cache_name: cache}
            token = ACTIVE_RUN.set(run)
            try:
                with torch.no_grad(), contextlib.suppress(ForwardFinished):
                    self._anatomy.decoder(
                        input_ids=ids,
                        # A mask of four axes is passed on as it is; each layer then gets its own.
                        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
                        position_ids=run.positions[None].to(device),
                        use_cache=True,
                        **arguments,
                    )
            finally:
                ACTIVE_RUN.reset(token)
            if run.masses is None:
                raise RuntimeError(f"a probe's forward ended before the attention of layer {layer} was called")
            parts.append(run.masses)
        return torch.cat(parts, dim=1)


class SharedLayer(DynamicLayer):
    """One layer of the branch's cache: what came before, held as it is; what is added is not kept.

    Args:
        key: ``[1, G, held, d]``, the last of the shared tokens.
        value: likewise.
        shared: number of shared tokens.
    """

    def __init__(self, key: Tensor, value: Tensor, shared: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = key, value
        self._key, self._value = key, value
        self.dtype, self.device = key.dtype, key.device
        self.is_initialized = True
        self._shared = shared

    @property
    def held(self) -> int:
        """Number of keys."""
        return int(self._key.shape[-2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values with those of new tokens after them."""
        return torch.cat([self._key, key_states], dim=-2), torch.cat([self._value, value_states], dim=-2)

    def get_seq_length(self) -> int:
        """Tokens that precede what is added."""
        return self._shared

    def get_mask_sizes(self, asked: Any) -> tuple[int, int]:
        """Keys of a forward, and the position of the first; ``asked`` is a count or, before 5.x, the positions."""
        added = asked if isinstance(asked, int) else int(asked.shape[0])
        return self.held + added, self._shared - self.held


class ProbeRun(PrefillRun):
    """A forward of probes side by side, up to the layer where they are read.

    It stands where the prompt's own run does while its forward lasts, so that the hooks act on it.

    Args:
        anatomy: the model.
        shared: tokens that precede every probe.
        suffixes: ids of each probe's tokens ``[B]``.
        layer: where to read.
        membership: of the prompt, ``[n, k]``.

    Attributes:
        positions: of all tokens in the prompts of their probes, int64 ``[Q]``, on the CPU.
        masses: ``[H_Q, B, k]`` once the layer has been read.
    """

    def __init__(
        self, anatomy: Anatomy, shared: int, suffixes: Sequence[Sequence[int]], layer: int, membership: Tensor
    ) -> None:
        self._lengths = [len(suffix) for suffix in suffixes]
        super().__init__(anatomy, sum(self._lengths))
        self._shared, self._target, self._membership = shared, layer, membership
        self.positions = torch.cat([torch.arange(shared, shared + length) for length in self._lengths])
        self._owner = torch.repeat_interleave(torch.arange(len(suffixes)), torch.tensor(self._lengths))
        self._masks: dict[tuple[int | None, torch.device], Tensor] = {}
        self.masses: Tensor | None = None

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The branch's forward starts."""
        self.check_cancelled()

    def end_forward(self) -> None:
        """Not reached: the forward is left at the layer that is read."""

    def enter_layer(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """A layer starts; it gets a mask that hides probes from each other, with its own window."""
        self.check_cancelled()
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if not isinstance(hidden, Tensor):
            raise RuntimeError(f"layer {layer} was called without hidden states")
        return args, {**kwargs, "attention_mask": self._mask(self.anatomy.windows[layer], hidden)}

    def wants(self, attention: nn.Module) -> bool:
        """Whether this attention call is to be read."""
        return attention is self.anatomy.attentions[self._target]

    def read(
        self, attention: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: Mapping[str, Any]
    ) -> None:
        """Read every row of every probe, and leave."""
        added = query.shape[2]
        held = key.shape[2] - added
        known = self._membership[self._shared - held : self._shared]
        scaling = kwargs.get("scaling")
        rows = read_rows(
            query,
            key,
            torch.arange(held, held + added),
            torch.cat([known, known.new_zeros(added, known.shape[1])]).to(query.device),
            scaling=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
            attention_mask=mask,
            softcap=kwargs.get("softcap"),
            sink_logits=kwargs.get("s_aux"),
            first=held,
        )
        each = rows.chunks.split(self._lengths, dim=1)
        self.masses = torch.stack([part.mean(dim=1) for part in each], dim=1)
        raise ForwardFinished

    def _mask(self, window: int | None, hidden: Tensor) -> Tensor:
        where = (window, hidden.device)
        if where not in self._masks:
            self._masks[where] = self._made_mask(window, hidden)
        return self._masks[where]

    def _made_mask(self, window: int | None, hidden: Tensor) -> Tensor:
        first = 0 if window is None else max(0, self._shared - window + 1)
        before = torch.arange(first, self._shared)
        keys = torch.cat([before, self.positions])
        owner = torch.cat([torch.full_like(before, -1), self._owner])
        allowed = keys[None, :] <= self.positions[:, None]
        allowed &= (owner[None, :] < 0) | (owner[None, :] == self._owner[:, None])
        if window is not None:
            allowed &= keys[None, :] > self.positions[:, None] - window
        mask = allowed[None, None].to(hidden.device)
        if self.anatomy.kernel != "eager":
            return mask
        zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        return zero.where(mask, torch.finfo(hidden.dtype).min)


def _packs(places: Sequence[int], bank: Bank) -> Iterator[list[int]]:
    """Cut the probes into groups of at most ``PACK_TOKENS`` tokens, of one probe at least."""
    pack: list[int] = []
    tokens = 0
    for place in places:
        length = len(bank.suffixes[place])
        if pack and tokens + length > PACK_TOKENS:
            yield pack
            pack, tokens = [], 0
        pack.append(place)
        tokens += length
    if pack:
        yield pack


def _cache_name(decoder: nn.Module) -> str:
    """The keyword for the cache, which was renamed between the releases of transformers that are supported."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
