"""Rows of generated tokens at the accepted layer: right for every family, kernel and way of decoding, and acted upon.

The reference is a plain, unpruned eager model over the prompt and the tokens that were generated: up to the accepted
layer a pruned run computes the same, so its rows there are the ones wanted. Nothing of the engine is in it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from families_for_tests import CASES, LAYERS, LONG, QUERY_HEADS, SHORT, Prompt, one_thread, shared
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_subject import STEPS, Subject, forward, greedy, subject
from oracle import reference_attention_rows
from tiny import LOOSE, model, request, tokenizer
from transformers import DynamicCache, StoppingCriteria

from entroprefill_rag import AuditRecord, GenerationResult, LocalBackend, PruneResult, PruningConfig
from entroprefill_rag.engine import decoding
from entroprefill_rag.engine.backend import Restarted, TextPiece
from entroprefill_rag.engine.decoding import DecodeWatch, removed_masses
from entroprefill_rag.engine.run import PrefillRun
from entroprefill_rag.engine.streaming import HeldStreamer, HoldBack

# One softmax in float32 over logits that carry the rounding of the layers below: seen, at most 1.2e-6.
TOLERANCE = 1e-5
PADDING = 5


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Subject]:
    installed = subject(*request.param)
    with one_thread():
        yield installed
    installed.installation.close()


def watched(case: Subject, layer: int, removed: list[int], n: int) -> PrefillRun:
    decision = case.decision(layer, removed, n)
    return PrefillRun(case.installation.anatomy, n, decision, torch.eye(n), decode=DecodeWatch(1.0))


def expected_masses(
    case: Subject, ids: list[int], n: int, layer: int, removed: list[int], padding: int
) -> torch.Tensor:
    """``[tokens after the prompt, H_Q]``."""
    rows = reference_attention_rows(shared(case.name, "eager"), ids, layer, torch.arange(n, len(ids)), padding)
    return rows[..., removed].sum(-1).T


@pytest.mark.parametrize("padding", [0, PADDING], ids=["bare", "padded"])
@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["above the window", "below the window"])
def test_rows_are_those_of_an_unpruned_run_over_the_same_tokens(case: Subject, prompt: Prompt, padding: int) -> None:
    ids = [0] * padding + prompt.ids
    chunks = (0, 2, 4) if prompt is LONG else (0, 2)
    removed = [token + padding for token in prompt.tokens_of(chunks)]
    for layer in case.family.prune_layers:
        run = watched(case, layer, removed, len(ids))
        with case.installation.activate(run):
            outcome = greedy(case.model, ids, padding=padding)
        assert run.decode.layer == layer
        masses = run.decode.rows()
        assert masses.shape == (STEPS, QUERY_HEADS)  # the last token was never fed back
        expected = expected_masses(case, [*ids, *outcome.tokens[:-1]], len(ids), layer, removed, padding)
        assert float((masses - expected).abs().max()) < TOLERANCE
        # Neither nothing nor everything, and not the same in all heads: else a wrong sum could pass.
        assert float(expected[0].max()) > 0.02
        assert float(expected[0].max() - expected[0].min()) > 0.005


@pytest.mark.parametrize("padding", [None, 0, PADDING], ids=["no mask", "a mask of ones", "padded"])
def test_rows_of_several_tokens_appended_at_once_are_right(case: Subject, padding: int | None) -> None:
    pads = padding or 0
    ids, appended = [0] * pads + LONG.ids, [17, 99, 54, 3, 76, 21]
    removed = [token + pads for token in LONG.tokens_of((0, 2, 4))]
    layer, n = case.family.prune_layers[0], len(ids)
    run = watched(case, layer, removed, n)
    cache = DynamicCache(config=case.model.config)
    with case.installation.activate(run):
        forward(case.model, ids, cache, padding=padding)
        for first, end in ((0, 3), (3, 4), (4, 6)):
            forward(case.model, appended[first:end], cache, start=n + first, padding=padding)
    expected = expected_masses(case, [*ids, *appended], n, layer, removed, pads)
    assert float((run.decode.rows() - expected).abs().max()) < TOLERANCE


def test_in_a_window_only_keys_within_it_count() -> None:
    """After as many tokens as the window holds, no removed token is in sight at a sliding layer."""
    installed = subject("mistral", "sdpa")
    removed = LONG.tokens_of((4,))  # ends 6 tokens before the prompt does
    run = watched(installed, 1, removed, LONG.n)
    with installed.installation.activate(run), one_thread():
        greedy(installed.model, LONG.ids, steps=8)
    installed.installation.close()
    masses = run.decode.rows()
    seen = (masses > 0).all(dim=1).tolist()
    assert seen == [True] * 5 + [False] * 3
    assert float(masses[5:].max()) == 0.0


def test_reading_changes_no_logit(case: Subject) -> None:
    removed = LONG.tokens_of((0, 3))
    layer = case.family.prune_layers[0]
    plain = case.generate(LONG.ids, case.decision(layer, removed, LONG.n))
    run = watched(case, layer, removed, LONG.n)
    with case.installation.activate(run):
        read = greedy(case.model, LONG.ids)
    assert torch.equal(read.logits, plain.logits)


def test_without_an_accepted_layer_nothing_is_read(case: Subject) -> None:
    decision = case.decision(LAYERS + 1, [], LONG.n)
    decision.layers = case.family.prune_layers
    run = PrefillRun(case.installation.anatomy, LONG.n, decision, torch.eye(LONG.n), decode=DecodeWatch(0.1))
    with case.installation.activate(run):
        greedy(case.model, LONG.ids, steps=2)
    assert run.decode.rows().numel() == 0
    assert run.decode.result() is None


def test_groups_may_be_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 6, 2, 8, generator=generator), torch.randn(1, 3, 11, 8, generator=generator)
    removed = (torch.arange(9) % 2).float()
    sinks = torch.randn(6, generator=generator)
    together = removed_masses(query, key, removed, scaling=0.5, sink_logits=sinks)
    monkeypatch.setattr(decoding, "BLOCK_ELEMENTS", 1)
    assert torch.allclose(removed_masses(query, key, removed, scaling=0.5, sink_logits=sinks), together, atol=1e-7)
    assert together.shape == (2, 6)


@pytest.mark.parametrize("given", [None, torch.ones(1, 11)], ids=["no mask", "a mask over tokens"])
def test_without_a_mask_causality_and_the_window_hold(given: torch.Tensor | None) -> None:
    """As flash attention has it: several rows at once, and whatever keys the cache still holds."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(1, 1, 11, 8, generator=generator)
    removed = (torch.arange(8) % 2).float()
    logits = query[0] @ key[0, 0].T
    for row in range(3):
        place = 8 + row
        logits[:, row, place + 1 :] = float("-inf")
        logits[:, row, : place - 4] = float("-inf")
    expected = (logits.softmax(-1)[..., :8] * removed).sum(-1).T
    masses = removed_masses(query, key, removed, scaling=1.0, window=5, attention_mask=given)
    assert torch.allclose(masses, expected, atol=1e-6)
    assert torch.allclose(
        removed_masses(query[:, :, -1:], key, removed, scaling=1.0, window=5), expected[-1:], atol=1e-6
    )


def test_low_precision_rows_are_summed_in_float32() -> None:
    """Thousands of keys of equal weight: in bfloat16 their sum would be off by percents."""
    query, key = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16), torch.ones(1, 1, 5000, 8, dtype=torch.bfloat16)
    masses = removed_masses(query, key, torch.ones(1234), scaling=0.3)
    assert masses.dtype == torch.float32
    assert torch.allclose(masses, torch.tensor(1234 / 5000), atol=1e-6)


def test_a_row_that_is_no_number_counts_as_all() -> None:
    query = torch.full((1, 2, 1, 8), float("nan"))
    masses = removed_masses(query, torch.ones(1, 1, 4, 8), torch.ones(2), scaling=1.0)
    assert masses.tolist() == [[1.0, 1.0]]


@settings(max_examples=200, deadline=None)
@given(keys=st.integers(2, 60), gone=st.integers(1, 59), halves=st.integers(-3, 3), ulp=st.booleans())
def test_the_record_and_the_stop_agree_at_the_threshold(keys: int, gone: int, halves: int, ulp: bool) -> None:
    """Thresholds at and around the mass, between two float32 numbers too: rounding must not carry it across."""
    gone = min(gone, keys - 1)
    mass = float(torch.full((gone,), 1 / keys).sum())
    step = np.spacing(np.float32(mass)) if ulp else mass * 2e-5
    threshold = min(0.999, max(1e-6, mass + halves * float(step) / 2))
    watch = DecodeWatch(threshold, "stop")
    watch.begin(1, torch.arange(gone, keys - 1), keys - 1)
    watch.read(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, keys, 4), None, keys, scaling=1.0)
    above = bool(watch.above(torch.device("cpu")))
    assert above == (float(watch.rows()) > threshold)
    seen = watch.result()
    assert (seen.first_above is not None) == above
    assert (seen.max_per_token[0] > threshold) == above
    assert seen.action == ("stopped" if above else "none")
    assert seen.max_per_token[0] == pytest.approx(float(watch.rows()), rel=5.1e-4)
    assert seen.mean == pytest.approx(seen.max_per_token[0], rel=1e-9)  # one head: the mean is the maximum


# -- the backend ----------------------------------------------------------------------------------------------------


SEEDED = LOOSE.model_copy(update={"audit": LOOSE.audit.model_copy(update={"seed": 7})})
OFF = PruningConfig(enabled=False)
TOKENS = 12


def drifting(on_drift: str, threshold: float | None = 0.5, **more: object) -> PruningConfig:
    """With 0.5, the tiny model's third generated token drifts (the series is checked below)."""
    return SEEDED.model_copy(update={"drift_threshold": threshold, "on_drift": on_drift, **more})


class Count:
    """A caller's streamer that writes down what it is given."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(tuple(value.reshape(-1).tolist()))

    def end(self) -> None:
        self.calls.append("end")


@pytest.fixture
def backend() -> Iterator[LocalBackend]:
    with LocalBackend(model(), tokenizer(), name="tiny", ledger=False) as made:
        yield made


def answer(backend: LocalBackend, config: PruningConfig, **more: object) -> GenerationResult:
    return backend.generate(request(), config, **{"max_new_tokens": TOKENS, "do_sample": False, **more})


def test_the_whole_series_is_recorded_but_for_the_last_token(backend: LocalBackend) -> None:
    result = answer(backend, drifting("record"))
    seen = result.audit.decode
    assert (seen.layer, seen.tokens, seen.threshold) == (2, TOKENS - 1, 0.5)
    assert len(seen.max_per_token) == TOKENS - 1
    assert seen.first_above == next(i for i, mass in enumerate(seen.max_per_token) if mass > 0.5) == 2
    assert (seen.action, result.finish_reason) == ("none", "length")
    assert 0 < seen.mean < np.mean(seen.max_per_token)
    assert AuditRecord.from_json(result.audit.to_json()) == result.audit


def test_the_recorded_series_is_that_of_the_plain_model(backend: LocalBackend) -> None:
    mine = Count()
    result = answer(backend, drifting("record"), streamer=mine)
    prompt, tokens = list(mine.calls[0]), [call[0] for call in mine.calls[1:-1]]
    with torch.no_grad():
        whole = model("eager")(torch.tensor([prompt + tokens[:-1]]), output_attentions=True)
    removed = [i for chunk in result.audit.prompt.chunks if not chunk.kept for i in range(chunk.start, chunk.end)]
    expected = whole.attentions[2][0][:, len(prompt) :, removed].sum(-1)
    assert result.audit.decode.max_per_token == pytest.approx(expected.amax(0).tolist(), rel=6e-4)
    assert result.audit.decode.mean == pytest.approx(float(expected.mean()), rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        drifting("record", decode_monitor=False),
        OFF,
        drifting("restart_full", eps_row=1e-9),
    ],
    ids=["monitor off", "pruning off", "bypassed"],
)
def test_nothing_is_read_where_it_is_off_or_nothing_was_pruned(
    backend: LocalBackend, config: PruningConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a row was read")

    monkeypatch.setattr(decoding, "removed_masses", never)
    result = answer(backend, config)
    assert result.audit.decode is None
    assert result.usage.given_up_tokens == 0


def test_filtering_decodes_nothing_and_a_single_token_has_no_row(backend: LocalBackend) -> None:
    assert backend.prune(request(), drifting("stop")).audit.decode is None
    seen = answer(backend, drifting("stop"), max_new_tokens=1).audit.decode
    assert (seen.tokens, seen.max_per_token, seen.mean, seen.first_above) == (0, (), 0.0, None)


def test_the_threshold_is_the_largest_cap_unless_given(backend: LocalBackend) -> None:
    assert answer(backend, drifting("record", None, eps_row=(0.9, 0.95))).audit.decode.threshold == 0.95
    assert answer(backend, drifting("record", None, eps_row=0.97)).audit.decode.threshold == 0.97


def test_stop_ends_the_answer_with_the_token_chosen_from_the_drifting_row(backend: LocalBackend) -> None:
    whole, stopped = answer(backend, drifting("record")), answer(backend, drifting("stop"))
    seen = stopped.audit.decode
    assert stopped.finish_reason == "drift"
    assert (seen.action, seen.first_above, seen.tokens) == ("stopped", 2, 3)
    assert stopped.usage.generated_tokens == 4
    assert seen.max_per_token == whole.audit.decode.max_per_token[:3]
    assert whole.answer.startswith(stopped.answer.rstrip("\ufffd"))
    assert stopped.audit.outcome == "pruned"


@pytest.mark.parametrize("on_drift", ["stop", "restart_full"])
def test_a_threshold_that_is_not_passed_changes_nothing(backend: LocalBackend, on_drift: str) -> None:
    whole, result = answer(backend, drifting("record", 0.99)), answer(backend, drifting(on_drift, 0.99))
    assert result.answer == whole.answer
    assert result.audit.decode.max_per_token == whole.audit.decode.max_per_token
    assert (result.audit.decode.action, result.finish_reason) == ("none", "length")
    assert result.audit.outcome == "pruned"


def test_a_restart_answers_in_full_and_says_so(backend: LocalBackend) -> None:
    full, result = answer(backend, OFF), answer(backend, drifting("restart_full"))
    pruned = answer(backend, drifting("record"))
    record = result.audit
    assert result.answer == full.answer != pruned.answer
    assert (record.outcome, record.reason.code) == ("bypassed", "drift_restart")
    assert "token 3" in record.reason.message
    assert (record.accepted_layer, record.tokens_removed, result.dropped_ids) == (None, 0, ())
    assert result.retained_ids == tuple(f"c{i}" for i in range(5))
    assert all(chunk.kept for chunk in record.prompt.chunks)
    assert record.claims.exact is None
    assert [trial.removed for trial in record.trials] == [trial.removed for trial in pruned.audit.trials]
    assert (record.decode.action, record.decode.first_above, record.decode.tokens) == ("restarted_full", 2, 3)
    assert AuditRecord.from_json(record.to_json()) == record


def test_a_restart_counts_both_runs(backend: LocalBackend) -> None:
    started = time.perf_counter()
    result = answer(backend, drifting("restart_full"))
    taken = time.perf_counter() - started
    assert (result.usage.generated_tokens, result.usage.given_up_tokens) == (TOKENS, 4)
    assert result.usage.kept_tokens == result.usage.prompt_tokens
    times = result.timings
    assert times.given_up > 0
    assert times.rule == 0.0  # of the full run; the first one's is in `given_up`
    parts = sum(times.model_dump().values())
    assert 0.5 * taken < parts <= taken
    assert times.first_token > times.given_up
    assert answer(backend, drifting("record")).timings.given_up == 0.0


def test_a_drift_at_the_last_row_restarts_too(backend: LocalBackend) -> None:
    """The answer had its full length when its last row passed the threshold."""
    result = answer(backend, drifting("restart_full"), max_new_tokens=4)
    assert result.audit.reason.code == "drift_restart"
    assert answer(backend, drifting("stop"), max_new_tokens=4).finish_reason == "drift"


def test_a_stream_calls_off_what_it_said_and_starts_again(backend: LocalBackend) -> None:
    items = list(backend.stream(request(), drifting("restart_full"), max_new_tokens=TOKENS, do_sample=False))
    at = next(i for i, item in enumerate(items) if isinstance(item, Restarted))
    assert isinstance(items[0], PruneResult)
    assert items[0].pruned
    assert items[0].audit.decode is None
    assert at > 1
    assert all(isinstance(item, TextPiece) for item in items[1:at])
    outcome, last = items[at + 1], items[-1]
    assert isinstance(outcome, PruneResult)
    assert items[at].reason == outcome.audit.reason == last.audit.reason
    assert outcome.retained_ids == last.retained_ids
    assert outcome.audit.decode == last.audit.decode
    assert "".join(item.text for item in items[at + 2 : -1]) == last.answer == answer(backend, OFF).answer


def test_async_calls_restart_as_well(backend: LocalBackend) -> None:
    async def main() -> tuple[GenerationResult, list[object]]:
        config, arguments = drifting("restart_full"), {"max_new_tokens": TOKENS, "do_sample": False}
        whole = await backend.agenerate(request(), config, **arguments)
        return whole, [item async for item in backend.astream(request(), config, **arguments)]

    whole, items = asyncio.run(main())
    assert whole.answer == items[-1].answer == answer(backend, OFF).answer
    assert sum(isinstance(item, Restarted) for item in items) == 1


def test_a_pending_answer_restarts_when_it_is_taken(backend: LocalBackend) -> None:
    def begin() -> object:
        return backend.begin(request(), drifting("restart_full"), max_new_tokens=TOKENS, do_sample=False)

    pending = begin()
    assert pending.outcome.pruned
    time.sleep(0.3)  # not counted as the given-up run's
    result = pending.result()
    assert result.audit.reason.code == "drift_restart"
    assert result.answer == answer(backend, OFF).answer
    assert result.timings.given_up < 0.3
    kinds = [type(item) for item in begin().stream()]
    assert kinds.count(PruneResult) == 2
    assert kinds.count(Restarted) == 1
    assert kinds.index(Restarted) < len(kinds) - 1 - kinds[::-1].index(PruneResult)


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize("threshold", [0.5, 0.99], ids=["restarted", "stands"])
def test_a_callers_streamer_gets_the_answer_that_stands_once(backend: LocalBackend, way: str, threshold: float) -> None:
    expected, mine = Count(), Count()
    answer(backend, OFF if threshold == 0.5 else drifting("record"), streamer=expected)
    arguments = {"max_new_tokens": TOKENS, "do_sample": False, "streamer": mine}
    config = drifting("restart_full", threshold)
    if way == "generate":
        backend.generate(request(), config, **arguments)
    else:
        list(backend.stream(request(), config, **arguments))
    assert mine.calls == expected.calls
    assert mine.calls.count("end") == 1


def test_a_held_streamer_lets_through_as_soon_as_the_answer_stands() -> None:
    mine, stands = Count(), [False]
    held = HeldStreamer(mine, lambda: stands[0])
    held.put(torch.tensor([[1, 2]]))
    assert mine.calls == []
    stands[0] = True
    held.put(torch.tensor([3]))
    assert mine.calls == [(1, 2), (3,)]
    held.end()
    held.release()
    assert mine.calls == [(1, 2), (3,), "end"]


def test_a_bypassed_answer_is_not_held_back_from_the_callers_streamer(backend: LocalBackend) -> None:
    seen: list[int] = []
    mine = Count()

    class Look(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(len(mine.calls))
            return torch.zeros(1, dtype=torch.bool)

    answer(backend, drifting("restart_full", eps_row=1e-9), streamer=mine, stopping_criteria=[Look()])
    assert seen[-1] >= TOKENS - 1
    assert mine.calls[-1] == "end"


def test_a_callers_stopping_criteria_end_either_run(backend: LocalBackend) -> None:
    class After(StoppingCriteria):
        def __init__(self, tokens: int) -> None:
            self.most = len(backend.layout(request(), SEEDED).input_ids) + tokens

        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= self.most])

    early = answer(backend, drifting("restart_full"), stopping_criteria=[After(2)])
    assert early.audit.outcome == "pruned"  # ended before the row that drifts was read
    assert early.usage.generated_tokens == 2
    late = answer(backend, drifting("restart_full"), stopping_criteria=[After(6)])
    assert late.audit.reason.code == "drift_restart"
    assert late.usage.generated_tokens == 6


def test_max_time_is_for_both_runs_together(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    given_times: list[float | None] = []
    own = backend.model.generate

    def noting(*args: object, **kwargs: object) -> object:
        given_times.append(kwargs.get("max_time"))
        return own(*args, **kwargs)

    monkeypatch.setattr(backend.model, "generate", noting)
    result = answer(backend, drifting("restart_full"), max_time=100.0)
    assert given_times == [100.0, pytest.approx(100.0 - result.timings.given_up)]
    given_times.clear()
    answer(backend, drifting("restart_full"))
    assert given_times == [None, None]


def test_sampling_restarts_without_a_new_seed(backend: LocalBackend) -> None:
    """The full run draws what comes next; seeded anew it would be tied to the run that was given up."""
    arguments = {"do_sample": True, "temperature": 1.3}
    torch.manual_seed(3)
    result = answer(backend, drifting("restart_full", 0.05), **arguments)
    assert result.audit.reason.code == "drift_restart"
    torch.manual_seed(3)
    answer(backend, SEEDED, **{**arguments, "max_new_tokens": result.usage.given_up_tokens})
    assert answer(backend, OFF, **arguments).answer == result.answer


@pytest.mark.parametrize("run", [0, 1], ids=["first run", "second run"])
def test_a_stream_that_is_left_ends_in_either_run(backend: LocalBackend, run: int) -> None:
    restarted = 0
    threshold = 0.99 if run == 0 else 0.5
    stream = backend.stream(request(), drifting("restart_full", threshold), max_new_tokens=1500)
    for item in stream:
        restarted += isinstance(item, Restarted)
        if isinstance(item, TextPiece) and restarted == run:
            break
    stream.close()
    assert restarted == run
    deadline = time.monotonic() + 5
    while any(thread.name == "entroprefill-stream" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert answer(backend, SEEDED, max_new_tokens=2).pruned


def test_a_cancelled_task_ends_in_the_second_run(backend: LocalBackend) -> None:
    async def main() -> None:
        entered, left = threading.Event(), threading.Event()
        own = backend._decode

        def noting(job, *rest):
            second = bool(job.given_up_tokens)
            if second:
                entered.set()
            try:
                return own(job, *rest)
            finally:
                if second:
                    left.set()

        backend._decode = noting
        task = asyncio.create_task(backend.agenerate(request(), drifting("restart_full"), max_new_tokens=1500))
        await asyncio.to_thread(entered.wait, 10)
        assert entered.is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # A token takes milliseconds: uncancelled, it would be at work for many seconds more.
        assert await asyncio.to_thread(left.wait, 3)

    asyncio.run(main())
    assert answer(backend, SEEDED, max_new_tokens=2).pruned


def test_threads_give_what_serial_calls_give(backend: LocalBackend) -> None:
    configs = [
        drifting(on_drift, threshold) for on_drift in ("record", "stop", "restart_full") for threshold in (0.5, 0.99)
    ]

    def told(config: PruningConfig) -> tuple[object, ...]:
        result = answer(backend, config)
        return result.answer, result.finish_reason, result.usage, result.audit.decode, result.audit.outcome

    serial = [told(config) for config in configs]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(told, configs)) == serial


def test_consumers_that_take_nothing_back_get_settled_items_only(backend: LocalBackend) -> None:
    def settled(config: PruningConfig) -> tuple[list[object], list[int]]:
        """Items that came through, and how many had come in before each."""
        hold, out, when = HoldBack(config), [], []
        stream = backend.stream(request(), config, max_new_tokens=TOKENS, do_sample=False)
        for count, item in enumerate(stream, start=1):
            for passed in hold.push(item):
                out.append(passed)
                when.append(count)
        return out, when

    for config, outcome, live in [
        (drifting("record"), "pruned", True),
        (drifting("restart_full", 0.99), "pruned", False),
        (drifting("restart_full"), "bypassed", True),
        (drifting("restart_full", eps_row=1e-9), "bypassed", True),
    ]:
        items, when = settled(config)
        kinds = [type(item) for item in items]
        assert (kinds[0], kinds[-1]) == (PruneResult, GenerationResult)
        assert set(kinds[1:-1]) == {TextPiece}
        assert items[0].audit.outcome == items[-1].audit.outcome == outcome
        assert "".join(item.text for item in items[1:-1]) == items[-1].answer
        assert (when[0] < when[-1]) == live
