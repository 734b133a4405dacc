"""What both adapters need: a backend found on first use, ids that cannot collide, a record in a few kilobytes."""

from __future__ import annotations

import copy
import hashlib
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.record import AuditRecord, DecodeMonitor, LayerTrial, Timings, Usage

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.engine.prompt_style import PromptStyle

_FULL_RECORD = "get_audit(response) gives the full record"

# Names a backend that was given as an object; can be no hub id and no folder's usual name.
_OBJECT = "object:"
# Backends at work in this process, by name: pickles carry the name, never the weights. Weak: keeps nothing alive.
_LIVING: weakref.WeakValueDictionary[str, LocalBackend] = weakref.WeakValueDictionary()
_LOADING = threading.Lock()
_default: LocalBackend | str | None = None


def set_default_backend(backend: LocalBackend | str | None) -> None:
    """Which backend adapters take that were given none: an object, a model's name, or None for none.

    Comes before ``ENTROPREFILL_MODEL`` and the packaged model. Adapters look on first use.
    """
    global _default
    _default = backend


class BackendSource:
    """A backend, or how to get one: nothing is loaded before :meth:`get`, and then once.

    The order is: ``backend``, ``model``, :func:`set_default_backend`, ``ENTROPREFILL_MODEL``, the packaged small model.
    Sources that name the same model share one backend while any of them holds it. Copies share the backend; a pickle
    carries names only, so unpickling loads nothing.

    Args:
        backend: one that is loaded already.
        model: a hub id, folder, GGUF file or packaged name, as for ``LocalBackend.from_pretrained``; or the ``model``
            of another source, which also names a backend given as an object, as long as that lives in this process.
    """

    def __init__(self, backend: LocalBackend | None = None, model: str | None = None) -> None:
        if backend is not None and model is not None:
            raise ConfigError(
                f"both backend={backend!r} and model={model!r} were given; the backend holds a model already, so pass "
                "one of them"
            )
        if model is not None and model.startswith(_OBJECT):
            backend = _LIVING.get(model)
        self.model = _register(backend) if backend is not None and model is None else model
        self._backend = backend

    @property
    def loaded(self) -> bool:
        """Whether a backend is there already."""
        return self._backend is not None

    @property
    def name(self) -> str:
        """The model's name as far as it is known without loading it."""
        if self._backend is not None:
            return self._backend.name
        return "default" if self.model is None or self.model.startswith(_OBJECT) else self.model

    def get(self) -> LocalBackend:
        """The backend, loaded now if need be. Safe to call from many threads.

        Raises:
            ModelSourceError: no model was named and none is installed, or it cannot be loaded.
            ConfigError: the backend was an object of another process.
        """
        if self._backend is None:
            with _LOADING:
                if self._backend is None:
                    self._backend = self._find()
        return self._backend

    def _find(self) -> LocalBackend:
        if self.model is not None and self.model.startswith(_OBJECT):
            raise ConfigError(
                "the backend was given as an object, in another process or gone by now, and weights do not travel in a "
                "pickle or dict; name the model (model='...'), or pass backend=... again here"
            )
        from entroprefill_rag.engine.backend import LocalBackend
        from entroprefill_rag.engine.sources import resolve_model

        if self.model is None and _default is not None and not isinstance(_default, str):
            return _default
        name = resolve_model(self.model or (_default if isinstance(_default, str) else None))
        living = _LIVING.get(name)
        if living is not None and not living._closed:
            return living
        made = LocalBackend.from_pretrained(name)
        _LIVING[name] = made
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendSource:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model = state["model"]
        self._backend = _LIVING.get(self.model) if self.model is not None else None

    def __repr__(self) -> str:
        return f"BackendSource({self.name!r}, {'loaded' if self.loaded else 'not loaded'})"


def _register(backend: LocalBackend) -> str:
    for token, living in list(_LIVING.items()):
        if living is backend and token.startswith(_OBJECT):
            return token
    token = f"{_OBJECT}{uuid.uuid4()}"
    _LIVING[token] = backend
    return token


def restyled(backend: LocalBackend, style: PromptStyle | None) -> LocalBackend:
    """The same backend, writing its prompts in another style: one model, one set of hooks, one queue."""
    if style is None or style == backend.style:
        return backend
    _ = backend.model_info  # computed once for all copies
    made = copy.copy(backend)
    made.style = style
    made.__dict__["_origin"] = backend  # whose end would take the hooks off the model
    return made


@dataclass(frozen=True)
class Ids:
    """Ids of a request's chunks: unique, and telling which of them are not the caller's own.

    Attributes:
        ids: per chunk, in order.
        stand_ins: position of each chunk whose id was made here -> why: ``"missing"`` or ``"duplicate"``.
    """

    ids: tuple[str, ...]
    stand_ins: dict[int, str] = field(default_factory=dict)

    def report(self) -> list[dict[str, Any]]:
        """The stand-ins as JSON data."""
        return [{"position": at, "id": self.ids[at], "why": why} for at, why in self.stand_ins.items()]


def unique_ids(ids: Sequence[str | None], texts: Sequence[str]) -> Ids:
    """Ids that cannot collide: the caller's own where there is one, else a hash of the text; repeats are numbered.

    Deterministic: the same lists give the same ids.

    Args:
        ids: per chunk, its id, or None (or "") where it has none.
        texts: per chunk, its text.
    """
    own = {chunk_id for chunk_id in ids if chunk_id}
    taken: set[str] = set()
    found: list[str] = []
    stand_ins: dict[int, str] = {}
    for position, (chunk_id, text) in enumerate(zip(ids, texts, strict=True)):
        wanted = chunk_id or f"text-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
        if not chunk_id:
            stand_ins[position] = "missing"
        elif wanted in taken:
            stand_ins[position] = "duplicate"
        name, number = wanted, 1
        while name in taken or (position in stand_ins and name in own):
            number += 1
            name = f"{wanted}#{number}"
        taken.add(name)
        found.append(name)
    return Ids(tuple(found), stand_ins)


def summary(
    record: AuditRecord,
    *,
    mode: str,
    usage: Usage | None = None,
    timings: Timings | None = None,
    full_record: str = _FULL_RECORD,
    **more: Any,
) -> dict[str, Any]:
    """A record in a few kilobytes of JSON data, for metadata, state and traces.

    Args:
        record: of one run.
        mode: how the run was used: ``"filter"``, ``"full"``, ``"handoff"``, ...
        usage: token counts, once the answer is there.
        timings: seconds of the parts of the run.
        full_record: how the full record is had.
        **more: further JSON data to put in.
    """
    chunks = record.prompt.chunks
    removed = record.tokens_removed
    made: dict[str, Any] = {
        "mode": mode,
        "outcome": record.outcome,
        "reason": record.reason.code,
        "message": record.reason.message,
        "model": record.model.name,
        "accepted_layer": record.accepted_layer,
        "monitored_layers": list(record.layers),
        "retained_ids": list(record.retained_ids),
        "dropped_ids": list(record.dropped_ids),
        "protected_ids": list(record.protected_ids),
        "not_admitted_ids": list(record.prompt.not_admitted),
        "tokens": {
            "prompt": record.prompt.tokens,
            "kept": record.prompt.tokens - removed,
            "removed": removed,
            "chunks": sum(chunk.end - chunk.start for chunk in chunks),
        },
        "caps": _caps(record),
        "audits": _audits(record.trial if record.outcome == "pruned" else None),
        "decode": _decode(record.decode),
        "claims": record.claims.model_dump(mode="json"),
        "seed": record.audit.seed if record.audit is not None else None,
        "prompt_hash": record.prompt.hash,
        "notes": list(record.prompt.notes),
        "full_record": full_record,
    }
    if usage is not None:
        made["tokens"]["generated"] = usage.generated_tokens
        made["tokens"]["given_up"] = usage.given_up_tokens
    if timings is not None:
        made["seconds"] = {name: round(float(value), 6) for name, value in timings.model_dump().items()}
    return {**made, **more}


def _caps(record: AuditRecord) -> dict[str, Any] | None:
    """Largest discarded mass of the accepted proposal, against the cap on it."""
    trial = record.trial
    if record.outcome != "pruned" or trial is None:
        return None
    return {
        "max_discarded": trial.max_discarded,
        "cap": record.config.get("eps_row"),
        "slack": trial.cap_slack,
    }


def _decode(seen: DecodeMonitor | None) -> dict[str, Any] | None:
    """What was seen while decoding, without the series."""
    if seen is None:
        return None
    return {
        "largest": max(seen.max_per_token, default=0.0),
        **seen.model_dump(mode="json", include={"tokens", "mean", "threshold", "first_above", "action"}),
    }


def _audits(trial: LayerTrial | None) -> list[dict[str, Any]]:
    """Per observer distribution, the worst head's bound against its limit."""
    if trial is None:
        return []
    return [
        {
            "observer": audit.observer,
            "method": audit.method,
            "bound": audit.bound,
            "m": audit.m,
            "worst": max(audit.upper, default=0.0),
            "limit": audit.limit,
            "accepted": audit.accepted,
        }
        for audit in trial.audits
    ]
