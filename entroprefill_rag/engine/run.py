"""One prompt on its way through one model: what the hooks do at each layer, and what was seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from entroprefill_rag.engine.decoding import DecodeWatch
from entroprefill_rag.engine.families import Anatomy
from entroprefill_rag.engine.gather import (
    TokenGather,
    append_mask,
    find_cache,
    stored_tokens,
    unknown_token_arguments,
    why_cache_cannot_be_ragged,
)
from entroprefill_rag.engine.tap import read_rows
from entroprefill_rag.record import Reason
from entroprefill_rag.rule.masses import RowMasses

RowReader = Callable[[Tensor, bool], RowMasses]


class ProbeBranch(Protocol):
    """Other questions run over the same documents; :class:`entroprefill_rag.engine.probes.Probes` is the one."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Note what a layer's attention works with."""

    def read(self, layer: int, places: Tensor, membership: Tensor, cancelled: threading.Event) -> Tensor:
        """Masses ``[H_Q, B, k]`` of the probes at these places of the bank, at ``layer``."""

    def release(self) -> None:
        """Forget what was noted."""


class LayerMonitor(Protocol):
    """What a run asks at each monitored layer; :class:`entroprefill_rag.rule.monitor.Monitor` is the one there is."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Monitored layers, ascending."""

    def observe(self, layer: int, read: RowReader) -> Any:
        """Decide at ``layer``; the result has ``accepted`` and, if so, ``kept_tokens``."""


@runtime_checkable
class NotesEvidence(Protocol):
    """A monitor that also reads layers for the order of removal at later, monitored ones."""

    @property
    def evidence_layers(self) -> tuple[int, ...]:
        """Layers whose rows are wanted, monitored ones perhaps among them."""

    def note(self, layer: int, read: RowReader) -> None:
        """Read a layer of ``evidence_layers`` that is not monitored."""


class RunCancelled(BaseException):
    """Leaves a forward whose caller has gone. Not an Exception, so that nothing on the way swallows it."""


class ForwardFinished(BaseException):
    """Leaves a forward that was started only to prune, as soon as the outcome is known."""


@dataclass
class Stamps:
    """Times of one run, `time.perf_counter` seconds."""

    begin: float = 0.0
    decided: float | None = None
    prefilled: float | None = None
    rule: float = 0.0
    layer_seconds: dict[int, float] = field(default_factory=dict)


class PrefillRun:
    """State of one prompt in one model, from the first layer to the last generated token.

    It is active only inside :meth:`Installation.activate`, in that thread or task; hooks do nothing without it.

    Args:
        anatomy: the model.
        n_tokens: length of the prompt; a first forward of another length is left alone.
        monitor: decides at monitored layers; None leaves the run unpruned.
        membership: 0/1 float32 ``[n, k]`` for the tap, on the CPU.
        probes: runs probe queries where the monitor asks for them; None where it will not.
        decode: reads the rows of generated tokens at the accepted layer; None leaves them unread.
        stop_when_known: leave the forward once the outcome is known (no generation follows).
        on_prefilled: called when the prompt has passed the last layer.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        n_tokens: int,
        monitor: LayerMonitor | None = None,
        membership: Tensor | None = None,
        *,
        probes: ProbeBranch | None = None,
        decode: DecodeWatch | None = None,
        stop_when_known: bool = False,
        on_prefilled: Callable[[], None] | None = None,
    ) -> None:
        self.anatomy = anatomy
        self.n_tokens = n_tokens
        self.monitor = monitor
        self.membership = membership
        self.probes = probes
        self.decode = decode
        self.stop_when_known = stop_when_known
        self.on_prefilled = on_prefilled
        self.cancelled = threading.Event()
        self.stamps = Stamps()
        self.layer: int | None = None
        self.gather: TokenGather | None = None
        self.refusal: Reason | None = None
        self._prefilling = False
        self._started = False
        self._seen = 0
        self._queries = torch.empty(0, dtype=torch.long, device="cpu")
        self._padding: Tensor | None = None
        self._memberships: dict[torch.device, Tensor] = {}
        self._last = monitor.layers[-1] if monitor is not None and monitor.layers else None
        self._noted = monitor.evidence_layers if isinstance(monitor, NotesEvidence) else ()

    # -- what the installation calls ------------------------------------------------------------------------------

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward of the decoder starts."""
        self.check_cancelled()
        given = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs.get("inputs_embeds") if given is None else given
        batch, length = (given.shape[0], given.shape[1]) if isinstance(given, Tensor) else (1, self.n_tokens)
        self._note_padding(kwargs.get("attention_mask"), self._seen + length)
        if not self._started:
            self._started = self._prefilling = True
            self.stamps.begin = time.perf_counter()
            if self.monitor is not None and (batch != 1 or length != self.n_tokens):
                self.refuse("prompt_split", f"the first forward took {batch} x {length} of {self.n_tokens} tokens")
        self._queries = torch.arange(self._seen, self._seen + length, device="cpu")
        self._seen += length

    def end_forward(self) -> None:
        """The decoder's last layer is done."""
        if self._prefilling:
            self._prefilling = False
            self.stamps.prefilled = time.perf_counter()
            self._memberships.clear()
            if self.gather is not None:
                self.gather.release()
            self._release_probes()
            if self.on_prefilled is not None:
                self.on_prefilled()

    def enter_layer(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """A decoder layer starts; returns its arguments cut down to retained tokens, or None to leave them."""
        self.check_cancelled()
        if self.layer is None:
            if self._watching(layer):
                self._check_arguments(layer, kwargs)
            return None
        if layer <= self.layer or self.gather is None:
            return None
        if self._prefilling:
            kwargs = self.gather.arguments(kwargs)
            if layer == self.layer + 1:
                args, kwargs = _map_hidden(self.gather.hidden, args, kwargs)
            return args, kwargs
        return args, {**kwargs, "attention_mask": self._append_mask(layer, args, kwargs)}

    def attending(self, attention: nn.Module, key: Tensor, value: Tensor) -> None:
        """An attention call of this model begins; probes keep what they will look at."""
        layer = getattr(attention, "layer_idx", None)
        if self.probes is None or self._last is None or not isinstance(layer, int) or layer > self._last:
            return
        undecided = self._prefilling and self.layer is None and self.refusal is None
        if undecided and attention is self.anatomy.attentions[layer]:
            self.probes.keep(layer, key, value)

    def wants(self, attention: nn.Module) -> bool:
        """Whether this attention call is to be read: a monitored layer of this model, in the prompt's prefill."""
        layer = getattr(attention, "layer_idx", None)
        return isinstance(layer, int) and self._watching(layer) and attention is self.anatomy.attentions[layer]

    def decodes(self, attention: nn.Module) -> bool:
        """Whether this attention call is that of appended tokens at the accepted layer, whose rows are wanted."""
        if self.decode is None or self.layer is None or self._prefilling:
            return False
        return attention is self.anatomy.attentions[self.layer]

    def read_appended(self, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """Note what the rows of appended tokens place on the removed ones."""
        if self.decode is not None:
            self.decode.read(query, key, mask, self._seen, **_layer_options(query, kwargs))

    def is_compacted(self, attention: nn.Module) -> bool:
        """Whether this attention call runs on retained tokens only."""
        layer = getattr(attention, "layer_idx", None)
        return isinstance(layer, int) and self.layer is not None and layer > self.layer

    def read(
        self, attention: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: Mapping[str, Any]
    ) -> None:
        """Let the monitor decide at this layer, from the query and key that its kernel is about to use."""
        monitor, membership = self.monitor, self.membership
        layer = int(attention.layer_idx)  # type: ignore[arg-type]
        if monitor is None or membership is None:
            return
        if key.shape[2] != self.n_tokens or query.shape[1] % key.shape[1]:
            self.refuse("attention_shape", f"layer {layer} gives {tuple(query.shape)} x {tuple(key.shape)}")
            return
        if self.is_ragged_window(layer):
            self.refuse(
                "window_kernel",
                f"{self.anatomy.kernel!r} counts sliding windows by index, which after pruning is not position; "
                "load the model with attn_implementation='sdpa'",
            )
            return
        if self.probes is not None and self._padding is not None:
            self.refuse("probe_padding", "the prompt holds padding, and probes are laid out without")
            return
        started = time.perf_counter()
        device = query.device
        if device not in self._memberships:
            self._memberships[device] = membership.to(device)
        options = _layer_options(query, kwargs)

        def read(rows: Tensor, tokens: bool) -> RowMasses:
            return read_rows(
                query,
                key,
                rows,
                self._memberships[device],
                attention_mask=mask,
                tokens=tokens,
                **options,
            )

        def probe(places: Tensor) -> Tensor:
            if self.probes is None:
                raise RuntimeError("probes were asked for in a run that was made without them")
            return self.probes.read(layer, places, membership, self.cancelled)

        decision = None
        with torch.no_grad():
            if layer in monitor.layers:
                decision = monitor.observe(layer, read if self.probes is None else _Reader(read, probe))
            elif isinstance(monitor, NotesEvidence):
                monitor.note(layer, read)
        seconds = time.perf_counter() - started
        self.stamps.rule += seconds
        self.stamps.layer_seconds[layer] = seconds
        if decision is None:
            return
        if decision.accepted:
            self.layer = layer
            self.gather = TokenGather(decision.kept_tokens, self.n_tokens)
            if self.decode is not None:
                self.decode.begin(layer, decision.kept_tokens, self.n_tokens)
        if decision.accepted or layer == self._last:
            self.stamps.decided = time.perf_counter()
            self._release_probes()
            if self.stop_when_known:
                raise ForwardFinished

    # -- what the backend asks ------------------------------------------------------------------------------------

    def refuse(self, code: str, message: str) -> None:
        """This prompt is not pruned, for a reason found on the way."""
        self.refusal = self.refusal or Reason(code=code, message=message)

    def check_cancelled(self) -> None:
        """Leave the forward if the caller has gone."""
        if self.cancelled.is_set():
            raise RunCancelled

    def is_ragged_window(self, layer: int) -> bool:
        """Whether pruning at ``layer`` would leave a windowed layer to a kernel that windows by index."""
        return not self.anatomy.materialises_masks and any(
            window is not None for window in self.anatomy.windows[layer + 1 :]
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _release_probes(self) -> None:
        if self.probes is not None:
            self.probes.release()

    def _watching(self, layer: int) -> bool:
        return (
            self._prefilling
            and self.layer is None
            and self.refusal is None
            and self.monitor is not None
            and (layer in self.monitor.layers or layer in self._noted)
        )

    def _check_arguments(self, layer: int, kwargs: Mapping[str, Any]) -> None:
        if unknown := unknown_token_arguments(kwargs, self.n_tokens):
            self.refuse("layer_arguments", f"layer {layer} takes {', '.join(unknown)}, unknown to the gather")
        if not self.stop_when_known and (problem := why_cache_cannot_be_ragged(find_cache(kwargs))):
            self.refuse("cache_implementation", problem)

    def _note_padding(self, mask: Any, total: int) -> None:
        # Read on the host once, at the prompt: what is generated is never padding.
        if isinstance(mask, Tensor) and mask.dim() == 2 and not self._started and mask.shape[0] == 1:
            visible = mask[0].bool().cpu()
            self._padding = None if bool(visible.all()) else visible
        elif self._padding is not None and total > self._padding.numel():
            more = torch.ones(total - self._padding.numel(), dtype=torch.bool, device="cpu")
            self._padding = torch.cat([self._padding, more])

    def _append_mask(self, layer: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        if self.gather is None:
            raise RuntimeError("a mask for appended tokens was asked for before anything was pruned")
        given = kwargs.get("attention_mask")
        given = given if isinstance(given, Tensor) else None
        window = self.anatomy.windows[layer]
        queries = self._queries
        if given is None and window is None and queries.numel() == 1 and self._padding is None:
            return None
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if not isinstance(hidden, Tensor):
            raise RuntimeError(f"layer {layer} was called without hidden states")
        past = int(queries[0])
        held = torch.cat([self.gather.kept, torch.arange(self.n_tokens, past, device="cpu")])
        stored = stored_tokens(find_cache(kwargs), layer)
        keys = torch.cat([held[held.numel() - stored :], queries])
        return append_mask(
            keys,
            queries,
            window=window,
            padding=self._padding,
            given=given,
            kernel=self.anatomy.kernel,
            dtype=hidden.dtype,
            device=hidden.device,
        )


@dataclass(frozen=True)
class _Reader:
    """Reads rows of one layer, and runs probes up to it (:class:`entroprefill_rag.rule.losses.ReadsProbes`)."""

    rows: RowReader
    probes: Callable[[Tensor], Tensor]

    def __call__(self, rows: Tensor, tokens: bool, /) -> RowMasses:
        return self.rows(rows, tokens)


def _layer_options(query: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes a layer's softmax, from the arguments of its attention function."""
    scaling = kwargs.get("scaling")
    return {
        "scaling": float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        "window": kwargs.get("sliding_window"),
        "softcap": kwargs.get("softcap"),
        "sink_logits": kwargs.get("s_aux"),
    }


def _map_hidden(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (function(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}
