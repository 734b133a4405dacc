"""LocalBackend: lays a request out, runs it through the model with pruning in mid-prefill, and keeps the record."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from entroprefill_rag.calibration.profile import ModelProfile, find, settle
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.engine import families
from entroprefill_rag.engine import generation as gen
from entroprefill_rag.engine.attempt import Attempt, begin_attempt
from entroprefill_rag.engine.decoding import DecodeWatch, StopOnDrift
from entroprefill_rag.engine.families import Anatomy
from entroprefill_rag.engine.install import Installation
from entroprefill_rag.engine.job import Job, checked
from entroprefill_rag.engine.layout import PromptStyle, SegmentTokenizer, build_layout
from entroprefill_rag.engine.pending import PendingAnswer
from entroprefill_rag.engine.probes import probes_for
from entroprefill_rag.engine.recording import OFF
from entroprefill_rag.engine.run import ForwardFinished, LayerMonitor, PrefillRun, ProbeBranch
from entroprefill_rag.engine.streaming import (
    HeldStreamer,
    Restarted,
    StopWhenSet,
    StreamItem,
    TextEmitter,
    TextPiece,
)
from entroprefill_rag.engine.workers import Workers, aiterate, iterate
from entroprefill_rag.errors import BackendClosedError, ConfigError
from entroprefill_rag.ledger import ReuseLedger
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.record import GenerationResult, ModelInfo, PruneResult, Reason, Usage
from entroprefill_rag.request import RagRequest
from entroprefill_rag.rule.masses import chunk_membership

__all__ = ["LocalBackend", "PendingAnswer", "PromptStyle", "Restarted", "StreamItem", "TextPiece"]


class LocalBackend:
    """A local causal language model that prunes retrieved chunks in the middle of its prefill.

    Many threads and tasks may call one backend: prefills take turns, decoding interleaves, results equal serial ones.

    Args:
        model: a causal language model of transformers (also wrapped by PEFT, quantised, or spread over devices).
        tokenizer: its tokenizer.
        name: shown in records; the model's own ``name_or_path`` by default.
        revision: shown in records.
        style: how the prompt is written.
        workers: threads for asynchronous calls.
        ledger: remembers whose draws were seen (``docs/guarantees.md``). None keeps one in memory, of this backend's
            own; one from ``ReuseLedger.open`` outlives it and may be shared; False keeps none.
        profile: which layers and heads find evidence: a profile, or a file of one. None takes the shipped one with this
            model's fingerprint, if there is one; False takes none.

    Raises:
        ConfigError: ``ledger`` is none of these.
        ProfileError: ``profile`` is none, or of a model of another shape.

    Example:
        >>> backend = LocalBackend.from_pretrained("smollm2-135m")  # doctest: +SKIP
        >>> result = backend.generate(request)  # doctest: +SKIP
        >>> result.answer, result.retained_ids, result.audit.outcome  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str | None = None,
        revision: str | None = None,
        style: PromptStyle | None = None,
        workers: int = 4,
        ledger: ReuseLedger | Literal[False] | None = None,
        profile: ModelProfile | str | Path | Literal[False] | None = None,
    ) -> None:
        if ledger is not None and ledger is not False and not isinstance(ledger, ReuseLedger):
            raise ConfigError(
                f"ledger must be a ReuseLedger, None (one in memory) or False (none), got {type(ledger).__name__}; a "
                "file is opened with ReuseLedger.open(path)"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or str(getattr(model, "name_or_path", "") or type(model).__name__)
        self.revision = revision
        self.style = style or PromptStyle()
        self.ledger = ReuseLedger() if ledger is None else (ledger or None)
        self._segments = SegmentTokenizer(tokenizer)
        self._installation = Installation(model)
        self._prefill_turn = threading.Lock()
        self._workers = Workers(workers)
        self._closed = False
        self._profile = ModelProfile.read(profile) if isinstance(profile, (str, Path)) else profile
        if isinstance(self._profile, ModelProfile):
            self._profile.check_shape(len(self.anatomy.layers), self.anatomy.query_heads, self.anatomy.kv_heads)
        # A backend that is dropped without close() must not leave its hooks on a model that lives on.
        self._finalizer = weakref.finalize(self, self._installation.close)

    @classmethod
    def from_pretrained(
        cls,
        name: str | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        attn_implementation: str | None = None,
        style: PromptStyle | None = None,
        workers: int = 4,
        ledger: ReuseLedger | Literal[False] | None = None,
        profile: ModelProfile | str | Path | Literal[False] | None = None,
        **model_kwargs: Any,
    ) -> LocalBackend:
        """Load a model and its tokenizer.

        Args:
            name: a hub id, a folder, a GGUF file or ``"smollm2-135m"``; None takes ``ENTROPREFILL_MODEL``, then the
                packaged model if it is installed.
            device: where it runs; None takes an accelerator if there is one.
            dtype: type of the weights; None takes the checkpoint's.
            revision: of a hub model.
            trust_remote_code: run code that comes with the model. Off unless asked for.
            allow_pickle: load weights that are pickles, which can run code. Off unless asked for.
            attn_implementation: attention kernel; None takes the model's default.
            style: how the prompt is written.
            workers: threads for asynchronous calls.
            ledger: remembers whose draws were seen; None keeps one in memory, False none.
            profile: which layers and heads find evidence; None takes the shipped one of this model, False none.
            **model_kwargs: passed to ``from_pretrained`` of the model (``device_map``, ``quantization_config``, ...).

        Raises:
            ModelSourceError: there is no such model, or it cannot be loaded; the message holds the way out.
        """
        from entroprefill_rag.engine.sources import load

        loaded = load(
            name,
            device=device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            attn_implementation=attn_implementation,
            **model_kwargs,
        )
        made = cls(
            loaded.model,
            loaded.tokenizer,
            name=loaded.name,
            revision=loaded.revision,
            style=style,
            workers=workers,
            ledger=ledger,
            profile=profile,
        )
        # Ledger and profile need it: made while loading, it does not delay the first answer.
        _ = made._fingerprint
        return made

    # -- what is asked of it --------------------------------------------------------------------------------------

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the model that pruning touches; ``anatomy.why_not`` says why it cannot be pruned, if so."""
        return self._installation.anatomy

    @cached_property
    def profile(self) -> ModelProfile | None:
        """The profile that weighs heads where ``head_weights`` is 'auto' or 'profile'; None without one."""
        if self._profile is None:
            return None if self.anatomy.why_not is not None else find(self.model_info.fingerprint)
        return self._profile or None

    @cached_property
    def model_info(self) -> ModelInfo:
        """The model as records name it."""
        device, dtype = families.device_and_dtype(self.model)
        anatomy = self.anatomy
        return ModelInfo(
            name=self.name,
            revision=self.revision,
            family=str(getattr(anatomy.config, "model_type", type(self.model).__name__)),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kernel=anatomy.kernel,
            layers=len(anatomy.layers),
            query_heads=anatomy.query_heads,
            kv_heads=anatomy.kv_heads,
            fingerprint=self._fingerprint,
        )

    @cached_property
    def _fingerprint(self) -> str:
        return families.fingerprint(self.model, self.tokenizer)

    def layout(
        self, request: RagRequest, config: PruningConfig | None = None, *, max_new_tokens: int = 1
    ) -> PromptLayout:
        """The prompt of ``request`` as token ids, with every chunk's span and what is protected.

        Args:
            request: chunks, instruction, query, history.
            config: for the number of sink tokens and what to do on overflow.
            max_new_tokens: room to leave for the answer.

        Raises:
            TemplateError: the template does not put all documents before the query.
            PromptOverflowError: the prompt does not fit the model.
        """
        config = checked(request, config)
        return build_layout(
            request,
            self._segments,
            style=self.style,
            sink_tokens=config.sink_tokens,
            max_positions=getattr(self.anatomy.config, "max_position_embeddings", None),
            reserve=max_new_tokens,
            overflow=config.overflow,
        )

    def generate(self, request: RagRequest, config: PruningConfig | None = None, **generation: Any) -> GenerationResult:
        """Answer ``request``: prefill, prune at the first layer that passes, decode.

        With ``on_drift="restart_full"`` a pruned answer that drifts is given up and the request answered again from a
        full prefill: sampling goes on from where the random state then is, stopping criteria apply to each run,
        ``max_time`` to both together, and a ``streamer`` gets the answer that stands, later.

        Args:
            request: chunks, instruction, query, history.
            config: limits and audit; the defaults where None.
            **generation: passed to the model's own ``generate`` (sampling, stop strings, streamers, ...);
                ``max_new_tokens`` is 256 where neither the caller nor the model sets it.

        Raises:
            RequestError: the request cannot be laid out (too long, template with the query first).
            ConfigError: configuration and model do not go together.
        """
        job = self._prepare(request, config, generation)
        return self._answer(job)

    def prune(self, request: RagRequest, config: PruningConfig | None = None) -> PruneResult:
        """Decide what to drop and stop there: the forward ends at the accepted (or last monitored) layer.

        For use with another model: the record says that its guarantees are about this model's attention, not about
        what the other one makes of a shortened prompt. The dual bound is left out.
        """
        job = self._prepare(request, config, {}, stop_when_known=True)
        if job.monitor is not None and job.monitor.layers:
            with job.turn(self._prefill_turn):
                self._forward(job.layout, job.run)
        job.ended = time.perf_counter()
        return job.outcome(self.model_info)

    def watch(self, layout: PromptLayout, monitor: LayerMonitor) -> PrefillRun:
        """Run a prompt's forward under a monitor of the caller's own, up to its last monitored layer.

        For measurements: nothing is generated and no record is made.

        Args:
            layout: from :meth:`layout`.
            monitor: is asked at each of its ``layers`` and may read any rows there.

        Raises:
            ConfigError: the model's attention cannot be read.
        """
        if self.anatomy.why_not is not None:
            raise ConfigError(self.anatomy.why_not.message)
        membership = chunk_membership(layout.chunk_spans, layout.n_tokens, first=layout.sink_tokens)
        run = PrefillRun(self.anatomy, layout.n_tokens, monitor, membership, stop_when_known=True)
        with self._prefill_turn:
            self._forward(layout, run)
        return run

    def stream(
        self, request: RagRequest, config: PruningConfig | None = None, **generation: Any
    ) -> Iterator[StreamItem]:
        """Answer ``request`` piece by piece: a PruneResult first, then TextPieces, then the GenerationResult.

        With ``on_drift="restart_full"`` a :class:`Restarted` may come after some text: drop what came before it. A new
        PruneResult follows, and text from the start. :class:`entroprefill_rag.engine.streaming.HoldBack` makes a
        stream for who cannot drop anything.

        Bad input raises here, before iteration. Leaving the loop early (or closing the iterator) ends the generation
        and frees its cache.
        """
        job = self._prepare(request, config, generation)
        return iterate(partial(self._answer, job), job.cancelled)

    def begin(self, request: RagRequest, config: PruningConfig | None = None, **generation: Any) -> PendingAnswer:
        """Prefill and prune now, decode later: the run waits before its first token until its answer is taken.

        Bad input raises here. An answer that nobody takes frees its cache when it is closed or collected.
        """
        return PendingAnswer(self._prepare(request, config, generation), self._answer, self.model_info)

    async def agenerate(
        self, request: RagRequest, config: PruningConfig | None = None, **generation: Any
    ) -> GenerationResult:
        """:meth:`generate` in a worker thread: the event loop stays free. Cancelling the task ends the generation."""
        job = await self._workers.call(partial(self._prepare, request, config, generation))
        return await self._workers.call(partial(self._answer, job), job.cancelled)

    async def aprune(self, request: RagRequest, config: PruningConfig | None = None) -> PruneResult:
        """:meth:`prune` in a worker thread."""
        return await self._workers.call(partial(self.prune, request, config))

    async def astream(
        self, request: RagRequest, config: PruningConfig | None = None, **generation: Any
    ) -> AsyncIterator[StreamItem]:
        """:meth:`stream` from a worker thread: the event loop stays free between pieces."""
        job = await self._workers.call(partial(self._prepare, request, config, generation))
        async with contextlib.aclosing(aiterate(partial(self._answer, job), job.cancelled)) as items:
            async for item in items:
                yield item

    def close(self) -> None:
        """Take hooks and attention function off the model. A closed backend refuses further calls."""
        self._closed = True
        self._finalizer()
        self._workers.close()

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LocalBackend({self.name!r}, kernel={self.anatomy.kernel!r})"

    # -- one call -------------------------------------------------------------------------------------------------

    def _prepare(
        self,
        request: RagRequest,
        config: PruningConfig | None,
        generation: dict[str, Any],
        *,
        stop_when_known: bool = False,
    ) -> Job:
        if self._closed:
            raise BackendClosedError("this backend was closed; make a new one from the same model and tokenizer")
        started = time.perf_counter()
        config = checked(request, config)
        gen.check_arguments(generation)
        effective = gen.effective(self.model, generation)
        most = 1 if stop_when_known else gen.new_tokens(effective, generation)
        layout = self.layout(request, config, max_new_tokens=most)
        generation = {**generation}
        if not stop_when_known and effective.max_new_tokens is None and generation.get("max_length") is None:
            generation["max_new_tokens"] = most
        config = self._settled(config, layout)
        attempt = self._attempt(layout, config)
        monitor, refusal = attempt.monitor, attempt.refusal
        if refusal is None and not stop_when_known and (refusal := gen.why_full(effective, generation)):
            monitor = None
        probes: ProbeBranch | None = None
        if monitor is not None and monitor.probes:
            made = probes_for(
                request,
                config,
                layout,
                monitor.probes,
                anatomy=self.anatomy,
                segments=self._segments,
                style=self.style,
                outputs=bool(effective.output_attentions or effective.output_hidden_states),
            )
            if isinstance(made, Reason):
                monitor, refusal = None, made
            else:
                probes = made
        membership = None
        if monitor is None:
            attempt.release()
        else:
            membership = chunk_membership(layout.chunk_spans, layout.n_tokens, first=layout.sink_tokens)
        run = PrefillRun(
            self.anatomy,
            layout.n_tokens,
            monitor,
            membership,
            probes=probes,
            decode=None if monitor is None or stop_when_known else DecodeWatch.of(config, len(monitor.proposal_rows)),
            stop_when_known=stop_when_known,
        )
        return Job(
            request=request,
            config=config,
            layout=layout,
            generation=generation,
            monitor=monitor,
            refusal=refusal,
            run=run,
            layout_seconds=time.perf_counter() - started,
            for_other_model=stop_when_known,
            attempt=attempt,
        )

    def _attempt(self, layout: PromptLayout, config: PruningConfig) -> Attempt:
        anatomy = self.anatomy
        if not config.enabled:
            return Attempt(refusal=OFF)
        if anatomy.why_not is not None:
            return Attempt(refusal=anatomy.why_not)
        if not layout.chunk_ids:
            nothing = Reason(code="no_chunks", message="The request holds no chunk: there is nothing to remove.")
            return Attempt(refusal=nothing)
        layers = self._layers(layout, config)
        if not layers:
            message = "No layer of this model sees back to the first chunk: all windows are shorter than the prompt."
            return Attempt(refusal=Reason(code="no_monitored_layer", message=message))
        return begin_attempt(self.ledger, config, layout, layers, self.model_info)

    def _settled(self, config: PruningConfig, layout: PromptLayout) -> PruningConfig:
        """The configuration with what the model's profile decides in it."""
        if not config.enabled or self.anatomy.why_not is not None or not layout.chunk_spans:
            return config
        return settle(config, self.profile, self._monitorable(layout))

    def _monitorable(self, layout: PromptLayout) -> tuple[int, ...]:
        block = (layout.chunk_spans[0][0], layout.chunk_spans[-1][1])
        return families.monitorable(self.anatomy, block, layout.n_tokens)

    def _layers(self, layout: PromptLayout, config: PruningConfig) -> tuple[int, ...]:
        depth = len(self.anatomy.layers)
        if config.layers == "auto":
            return families.default_layers(self.anatomy, self._monitorable(layout))
        wrong = [layer for layer in config.layers if layer >= depth - 1]
        if wrong:
            raise ConfigError(
                f"layers {wrong} cannot be monitored: {self.name} has layers 0..{depth - 1}, and after the last one "
                f"nothing is left to save; choose from 1..{depth - 2}"
            )
        return config.layers

    def _inputs(self, layout: PromptLayout) -> tuple[Tensor, Tensor]:
        device, _ = families.device_and_dtype(self.model)
        ids = torch.tensor([layout.input_ids], dtype=torch.long, device=device)
        return ids, torch.ones_like(ids)

    def _forward(self, layout: PromptLayout, run: PrefillRun) -> None:
        """The decoder alone, without a cache, until the run leaves it."""
        ids, mask = self._inputs(layout)
        with self._installation.activate(run), torch.inference_mode(), contextlib.suppress(ForwardFinished):
            self.anatomy.decoder(input_ids=ids, attention_mask=mask, use_cache=False)

    def _answer(self, job: Job, emit: Callable[[StreamItem], None] | None = None) -> GenerationResult:
        """Run one job to its end in this thread: once, or twice where a pruned answer drifts and is given up."""
        first, streamer = job.run, job.generation.get("streamer")
        held: HeldStreamer | None = None
        if streamer is not None and first.decode is not None and job.config.on_drift == "restart_full":
            held = HeldStreamer(streamer, lambda: first.stamps.prefilled is not None and first.layer is None)
        generated = self._decode(job, emit, held or streamer)
        if first.decode is not None:
            # The last token generated is never fed back: it has no row.
            job.decode = first.decode.result(max(0, len(generated) - 1))
        if job.decode is not None and job.decode.action == "restarted_full":
            first.check_cancelled()
            reason = job.restart(job.decode, len(generated))
            if emit is not None:
                emit(Restarted(reason))
            generated = self._decode(job, emit, streamer)
        elif held is not None:
            held.release()
        job.ended = time.perf_counter()
        return self._result(job, generated)

    def _decode(self, job: Job, emit: Callable[[StreamItem], None] | None, streamer: Any) -> list[int]:
        """One prefill and the tokens generated from it."""
        arguments = dict(job.generation)
        effective = gen.effective(self.model, arguments)
        if streamer is not None:
            arguments["streamer"] = streamer
        if emit is not None:
            arguments["streamer"] = TextEmitter(
                self._text,
                emit=lambda text: emit(TextPiece(text)),
                on_first=lambda: emit(job.outcome(self.model_info)),
                also=streamer,
            )
        if effective.max_time is not None and job.given_up_seconds:
            arguments["max_time"] = max(0.0, effective.max_time - job.given_up_seconds)
        criteria = StoppingCriteriaList(arguments.pop("stopping_criteria", None) or [])
        criteria.append(StopWhenSet(job.run.cancelled))
        if job.run.decode is not None and job.config.on_drift != "record":
            criteria.append(StopOnDrift(job.run.decode))
        if arguments.get("stop_strings") is not None:
            arguments.setdefault("tokenizer", self.tokenizer)
        with job.turn(self._prefill_turn), self._installation.activate(job.run):
            ids, mask = self._inputs(job.layout)
            output = self.model.generate(ids, attention_mask=mask, stopping_criteria=criteria, **arguments)
        sequences = output if isinstance(output, Tensor) else output.sequences
        generated: list[int] = sequences[0, job.layout.n_tokens :].tolist()
        return generated

    def _result(self, job: Job, generated: list[int]) -> GenerationResult:
        """What a finished job gives back."""
        answer = self._text(generated)
        trials = job.monitor.finish() if job.monitor is not None else None
        record = job.record(self.model_info, trials=trials, answer=answer)
        effective = gen.effective(self.model, job.generation)
        most = gen.new_tokens(effective, job.generation, job.layout.n_tokens)
        stopped = job.decode is not None and job.decode.action == "stopped"
        return GenerationResult(
            answer=answer,
            retained_ids=record.retained_ids,
            dropped_ids=record.dropped_ids,
            protected_ids=record.protected_ids,
            finish_reason=gen.finish_reason(generated, effective, most, job.run.cancelled.is_set(), stopped),
            usage=Usage(
                prompt_tokens=job.layout.n_tokens,
                kept_tokens=job.layout.n_tokens - record.tokens_removed,
                generated_tokens=len(generated),
                given_up_tokens=job.given_up_tokens,
            ),
            timings=job.timings(),
            audit=record,
        )

    def _text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
