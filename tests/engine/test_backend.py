"""The backend: what comes back, that nothing stays behind, and that nothing is silently different."""

import asyncio
import contextvars
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import LOOSE, model, request, tokenizer
from transformers import TextStreamer

from entroprefill_rag import AuditRecord, GenerationResult, LocalBackend, PruneResult, PruningConfig
from entroprefill_rag.engine.backend import TextPiece
from entroprefill_rag.engine.tap import ACTIVE_RUN
from entroprefill_rag.errors import AnswerTakenError, BackendClosedError, ConfigError, PromptOverflowError

SEEDED = LOOSE.model_copy(update={"audit": LOOSE.audit.model_copy(update={"seed": 7})})
OFF = PruningConfig(enabled=False)
STRICT = LOOSE.model_copy(update={"eps_row": 1e-9})


@pytest.fixture
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made


def plain(backend, layout, **generation):
    """What transformers alone makes of the same prompt, with a model that was never touched."""
    ids = torch.tensor([layout.input_ids])
    output = model().generate(ids, attention_mask=torch.ones_like(ids), **generation)
    return backend.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def ids_of(things):
    return [chunk.id for chunk in things]


def test_a_pruned_answer_says_what_was_kept_and_dropped(backend):
    asked = request()
    result = backend.generate(asked, LOOSE, max_new_tokens=5)
    assert result.pruned
    assert result.audit.accepted_layer == 2
    assert result.dropped_ids
    assert sorted(result.retained_ids + result.dropped_ids) == ids_of(asked.chunks)
    assert list(result.retained_ids) == sorted(result.retained_ids)
    dropped = [chunk for chunk in result.audit.prompt.chunks if not chunk.kept]
    assert result.usage.prompt_tokens - result.usage.kept_tokens == sum(chunk.end - chunk.start for chunk in dropped)
    assert result.usage.generated_tokens == 5
    assert result.finish_reason == "length"
    assert result.audit.claims.exact
    assert result.audit.claims.probabilistic
    assert result.timings.shallow > 0
    assert result.timings.deep > 0


def test_pruning_changes_what_the_model_computes(backend):
    layout = backend.layout(request(), LOOSE)
    kept = backend.generate(request(), LOOSE, max_new_tokens=12).answer
    assert kept != plain(backend, layout, do_sample=False, max_new_tokens=12)


@pytest.mark.parametrize("config", [OFF, STRICT], ids=["off", "bypassed"])
def test_without_pruning_the_answer_is_that_of_plain_transformers(backend, config):
    layout = backend.layout(request(), config)
    result = backend.generate(request(), config, max_new_tokens=12, do_sample=False)
    assert result.audit.outcome == ("off" if config is OFF else "bypassed")
    assert result.answer == plain(backend, layout, do_sample=False, max_new_tokens=12)
    assert result.retained_ids == tuple(f"c{i}" for i in range(5))
    assert result.dropped_ids == ()


def test_sampling_without_pruning_is_that_of_plain_transformers(backend):
    layout = backend.layout(request(), OFF)
    arguments = {"do_sample": True, "temperature": 1.3, "top_k": 20, "max_new_tokens": 10}
    torch.manual_seed(3)
    expected = plain(backend, layout, **arguments)
    torch.manual_seed(3)
    assert backend.generate(request(), OFF, **arguments).answer == expected


@pytest.mark.parametrize(
    ("arguments", "code"), [({"num_beams": 3}, "generation_mode"), ({"use_cache": False}, "no_cache")]
)
def test_decoding_that_pruning_does_not_go_with_is_answered_in_full(backend, arguments, code):
    layout = backend.layout(request(), LOOSE)
    result = backend.generate(request(), LOOSE, max_new_tokens=6, do_sample=False, **arguments)
    assert (result.audit.outcome, result.audit.reason.code) == ("bypassed", code)
    assert result.answer == plain(backend, layout, do_sample=False, max_new_tokens=6, **arguments)


def test_a_static_cache_is_answered_in_full(backend):
    result = backend.generate(request(), LOOSE, max_new_tokens=3, cache_implementation="static", disable_compile=True)
    assert (result.audit.outcome, result.audit.reason.code) == ("bypassed", "cache_implementation")


def test_chunked_prefill_is_answered_in_full(backend):
    layout = backend.layout(request(), LOOSE)
    result = backend.generate(request(), LOOSE, max_new_tokens=6, do_sample=False, prefill_chunk_size=64)
    assert (result.audit.outcome, result.audit.reason.code) == ("bypassed", "prompt_split")
    assert result.answer == plain(backend, layout, do_sample=False, max_new_tokens=6)


def test_a_streamer_and_stop_strings_pass_through(backend):
    class Count(TextStreamer):
        calls = 0

        def put(self, value):
            self.calls += 1

        def end(self):
            self.calls += 100

    streamer = Count(backend.tokenizer)
    free = backend.generate(request(), SEEDED, max_new_tokens=8, streamer=streamer)
    assert streamer.calls == 1 + 8 + 100
    stop = next(char for char in free.answer[2:] if char.isprintable() and char != "\ufffd")
    stopped = backend.generate(request(), SEEDED, max_new_tokens=8, stop_strings=[stop])
    assert free.answer.startswith(stopped.answer)
    assert stopped.answer.endswith(stop)
    assert stopped.finish_reason in ("stop", "length")


def test_the_same_seed_gives_the_same_draws(backend):
    first, second = (backend.generate(request(), SEEDED, max_new_tokens=2).audit for _ in range(2))
    assert first.audit.observers == second.audit.observers
    assert first.trials == second.trials
    other = backend.generate(request(), LOOSE, max_new_tokens=2).audit
    assert other.audit.seed != first.audit.seed


def test_prune_stops_the_forward_at_the_accepted_layer(backend):
    entered = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, index=index: entered.append(index))
        for index, layer in enumerate(backend.anatomy.layers)
    ]
    result = backend.prune(request(), SEEDED)
    for hook in hooks:
        hook.remove()
    assert entered == [0, 1, 2]
    assert result.retained_ids == backend.generate(request(), SEEDED, max_new_tokens=1).retained_ids
    assert "Another model" in result.audit.claims.conditional
    assert not backend.prune(request(), STRICT).pruned
    assert entered == [0, 1, 2]


def test_a_bypassed_prune_stops_after_the_last_monitored_layer(backend):
    entered = []
    hook = backend.anatomy.layers[4].register_forward_pre_hook(lambda *_: entered.append(4))
    result = backend.prune(request(), STRICT)
    hook.remove()
    assert not result.pruned
    assert not entered


def test_a_stream_is_outcome_then_text_then_result(backend):
    items = list(backend.stream(request(), SEEDED, max_new_tokens=9))
    assert isinstance(items[0], PruneResult)
    assert all(isinstance(item, TextPiece) for item in items[1:-1])
    last = items[-1]
    assert isinstance(last, GenerationResult)
    assert "".join(piece.text for piece in items[1:-1]) == last.answer
    assert last.answer == backend.generate(request(), SEEDED, max_new_tokens=9).answer
    assert items[0].retained_ids == last.retained_ids


def test_bad_input_to_a_stream_raises_at_the_call(backend):
    with pytest.raises(ConfigError, match="layers"):
        backend.stream(request(), LOOSE.model_copy(update={"layers": (5,)}))


def test_a_pending_answer_is_pruned_now_and_decoded_when_taken(backend):
    with backend.begin(request(), SEEDED, max_new_tokens=9) as pending:
        assert pending.outcome.pruned
        # Its prefill is over: others may run while it waits.
        expected = backend.generate(request(), SEEDED, max_new_tokens=9)
        assert pending.result().answer == expected.answer
        with pytest.raises(AnswerTakenError):
            pending.stream()


def test_a_pending_answer_streams_like_any_other(backend):
    items = list(backend.begin(request(), SEEDED, max_new_tokens=9).stream())
    assert [type(item) for item in items[:2]] == [PruneResult, TextPiece]
    assert "".join(item.text for item in items[1:-1]) == items[-1].answer


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_a_pending_answer_that_nobody_takes_leaves(backend, leave):
    pending = backend.begin(request(), LOOSE, max_new_tokens=9)
    if leave == "close":
        pending.close()
        with pytest.raises(AnswerTakenError):
            pending.result()
    else:
        del pending
        gc.collect()
    assert not streaming_threads()


def test_a_prefill_that_fails_raises_where_the_answer_is_begun(backend):
    def fail(*_):
        raise RuntimeError("layer broke")

    hook = backend.anatomy.layers[4].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="layer broke"):
        backend.begin(request(), LOOSE)
    hook.remove()
    assert not streaming_threads()


def test_async_calls_equal_sync_ones_and_keep_the_loop_free(backend):
    async def main():
        gaps = []

        async def heart():
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                gaps.append(time.perf_counter() - before)

        task = asyncio.create_task(heart())
        answer = await backend.agenerate(request(), SEEDED, max_new_tokens=20)
        pieces = [item async for item in backend.astream(request(), SEEDED, max_new_tokens=20)]
        pruned = await backend.aprune(request(), SEEDED)
        task.cancel()
        return answer, pieces, pruned, gaps

    answer, pieces, pruned, gaps = asyncio.run(main())
    expected = backend.generate(request(), SEEDED, max_new_tokens=20)
    assert answer.answer == pieces[-1].answer == expected.answer
    assert pruned.retained_ids == expected.retained_ids
    assert len(gaps) > 5


def test_threads_give_what_serial_calls_give(backend):
    asked = [request(chunks=3 + i % 4, words=3 + i) for i in range(8)]
    configs = [SEEDED, OFF, STRICT, SEEDED] * 2
    serial = [backend.generate(r, c, max_new_tokens=8).answer for r, c in zip(asked, configs, strict=True)]
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(
            lambda pair: backend.generate(*pair, max_new_tokens=8).answer, zip(asked, configs, strict=True)
        )
        assert list(together) == serial


def test_interleaved_streams_do_not_see_each_other(backend):
    first = backend.stream(request(chunks=4), SEEDED, max_new_tokens=6)
    second = backend.stream(request(chunks=6), SEEDED, max_new_tokens=6)
    assert isinstance(next(first), PruneResult)
    assert isinstance(next(second), PruneResult)
    a, b = list(first)[-1], list(second)[-1]
    assert len(a.audit.prompt.chunks) == 4
    assert len(b.audit.prompt.chunks) == 6


def streaming_threads():
    return [thread for thread in threading.enumerate() if thread.name == "entroprefill-stream"]


def test_an_abandoned_stream_ends_and_frees_the_prefill(backend):
    for item in backend.stream(request(), LOOSE, max_new_tokens=1500):
        if isinstance(item, TextPiece):
            break
    gc.collect()
    deadline = time.monotonic() + 5
    while streaming_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not streaming_threads()
    assert backend.generate(request(), LOOSE, max_new_tokens=2).pruned


def test_a_cancelled_task_ends_its_generation(backend):
    async def main():
        task = asyncio.create_task(backend.agenerate(request(), LOOSE, max_new_tokens=1500))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    started = time.monotonic()
    assert backend.generate(request(), LOOSE, max_new_tokens=2).pruned
    assert time.monotonic() - started < 5


def test_an_exception_inside_a_layer_leaves_nothing_behind(backend):
    def fail(*_):
        raise RuntimeError("layer broke")

    for layer in (1, 4):
        hook = backend.anatomy.layers[layer].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="layer broke"):
            backend.generate(request(), LOOSE, max_new_tokens=2)
        hook.remove()
        assert ACTIVE_RUN.get() is None
    assert backend.generate(request(), LOOSE, max_new_tokens=2).pruned


def test_the_active_run_is_seen_by_nobody_else(backend):
    seen = []
    hook = backend.anatomy.layers[3].register_forward_pre_hook(lambda *_: seen.append(ACTIVE_RUN.get()))
    backend.generate(request(), LOOSE, max_new_tokens=1)
    hook.remove()
    assert seen[0] is not None
    assert ACTIVE_RUN.get() is None
    assert contextvars.Context().run(ACTIVE_RUN.get) is None


def test_calls_do_not_grow_memory(backend):
    def tensors():
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    backend.generate(request(), LOOSE, max_new_tokens=2)
    before = tensors()
    for index in range(200):
        backend.generate(request(chunks=2 + index % 5), LOOSE, max_new_tokens=1)
    assert tensors() == before


def test_closing_gives_the_model_back_as_it_was():
    touched = model()
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in touched.modules())
    backend = LocalBackend(touched, tokenizer())
    assert touched.config._attn_implementation == "entroprefill_sdpa"
    backend.close()
    backend.close()
    assert touched.config._attn_implementation == "sdpa"
    assert sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in touched.modules()) == hooks
    with pytest.raises(BackendClosedError):
        backend.generate(request())


def test_a_dropped_backend_takes_its_hooks_along():
    touched = model()
    backend = LocalBackend(touched, tokenizer())
    del backend
    gc.collect()
    assert touched.config._attn_implementation == "sdpa"


def test_two_backends_on_one_model_work_side_by_side():
    shared = model()
    first, second = LocalBackend(shared, tokenizer()), LocalBackend(shared, tokenizer())
    expected = first.generate(request(), SEEDED, max_new_tokens=4).answer
    assert second.generate(request(), SEEDED, max_new_tokens=4).answer == expected
    first.close()
    assert second.generate(request(), SEEDED, max_new_tokens=4).answer == expected
    assert second.generate(request(), SEEDED, max_new_tokens=4).pruned
    second.close()
    assert shared.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layers", [(5,), (2, 40)])
def test_layers_the_model_does_not_have_are_refused(backend, layers):
    with pytest.raises(ConfigError, match=r"choose from 1\.\.4"):
        backend.generate(request(), LOOSE.model_copy(update={"layers": layers}))


def test_an_audit_that_can_never_pass_names_the_draws_it_needs(backend):
    config = PruningConfig(layers=(2,), audit={"m_a": 5, "bound": "hoeffding", "observers": [{"kind": "prompt_rows"}]})
    with pytest.raises(ConfigError, match=r"m_a"):
        backend.generate(request(), config)


@pytest.mark.parametrize(
    ("asked", "config", "code"),
    [
        (request(chunks=0), LOOSE, "no_chunks"),
        (request(chunks=1), LOOSE, "too_few_chunks"),
        (request(), LOOSE.model_copy(update={"m0": 9}), "too_few_chunks"),
    ],
)
def test_what_cannot_be_pruned_is_answered_in_full_with_the_reason(backend, asked, config, code):
    result = backend.generate(asked, config, max_new_tokens=2)
    assert (result.audit.outcome, result.audit.reason.code) == ("bypassed", code)
    assert result.usage.generated_tokens == 2
    assert backend.prune(asked, config).audit.reason.code == code


def test_a_prompt_that_does_not_fit_is_refused_or_loses_its_last_chunks(backend):
    long = request(chunks=40, words=12)
    with pytest.raises(PromptOverflowError, match="drop_last"):
        backend.generate(long, LOOSE)
    result = backend.generate(long, LOOSE.model_copy(update={"overflow": "drop_last"}), max_new_tokens=4)
    assert result.audit.prompt.not_admitted
    assert result.usage.prompt_tokens + 4 <= 2048
    assert not set(result.audit.prompt.not_admitted) & set(result.retained_ids + result.dropped_ids)


def test_a_record_holds_no_text_unless_asked(backend):
    result = backend.generate(request(), LOOSE, max_new_tokens=6)
    text = result.audit.to_json()
    assert not any(secret in text for secret in ("word00", "Which word", "title 1"))
    assert result.audit.answer is None
    assert AuditRecord.from_json(text) == result.audit
    open_ = backend.generate(request(), LOOSE.model_copy(update={"include_text": True}), max_new_tokens=6).audit
    assert open_.prompt.query == request().query
    assert open_.prompt.chunks[0].text == request().chunks[0].text
    assert open_.answer is not None


def test_five_hundred_chunks_are_no_trouble():
    with LocalBackend(model(), tokenizer()) as backend:
        backend.model.config.max_position_embeddings = 20_000
        result = backend.generate(request(chunks=500, words=1), LOOSE, max_new_tokens=2)
    assert result.pruned
    assert len(result.audit.prompt.chunks) == 500


def test_eager_models_are_read_without_a_change_of_kernel():
    with LocalBackend(model("eager"), tokenizer()) as backend:
        result = backend.generate(request(), SEEDED, max_new_tokens=6)
    with LocalBackend(model("sdpa"), tokenizer()) as backend:
        expected = backend.generate(request(), SEEDED, max_new_tokens=6)
    assert result.audit.model.kernel == "eager"
    assert result.answer == expected.answer
    assert result.dropped_ids == expected.dropped_ids
