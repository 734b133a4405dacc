"""A probe's branch gives what a forward of the probe's own prompt gives, and leaves no trace in the prompt's run."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from families_for_tests import CASES, FAMILIES, VOCABULARY, build, one_thread, shared
from matrix_subject import greedy, subject
from torch import Tensor

from entroprefill_rag import AuditConfig, Chunk, LocalBackend, PruningConfig, RagRequest
from entroprefill_rag.config import ProbeQueries, PromptRows, SuffixRows
from entroprefill_rag.engine.layout import PromptStyle, SegmentTokenizer, build_layout
from entroprefill_rag.engine.probes import PACK_TOKENS, Bank, Probes, lay_out, probes_for
from entroprefill_rag.engine.run import ForwardFinished, PrefillRun, RunCancelled
from entroprefill_rag.engine.tap import ACTIVE_RUN
from entroprefill_rag.record import AuditRecord, Reason
from entroprefill_rag.rule.masses import chunk_membership

# Through a window of 12 the last rows of the longer probes no longer reach all of these chunks.
CHUNKS, SHARED, N, SINKS = ((4, 9), (10, 15), (16, 22)), 24, 30, 5


def ids_of(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()


PROMPT = ids_of(1, N)
SUFFIXES = {place: tuple(ids_of(50 + place, length)) for place, length in enumerate((7, 1, 13, 4))}
LAYER = 4


@dataclass
class AsksProbes:
    """Asks for probes where a monitor would, and accepts nothing (or what it is told to)."""

    layers: tuple[int, ...]
    places: Tensor
    kept: Tensor | None = None
    masses: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, layer: int, read: Any) -> Any:
        self.masses[layer] = read.probes(self.places)
        return Decision(self.kept is not None and layer == self.layers[-1], self.kept)


@dataclass
class Decision:
    accepted: bool
    kept_tokens: Tensor | None


def expected(model: Any, layer: int, suffix: tuple[int, ...]) -> Tensor:
    """Masses on the chunks, mean over the probe's rows, from a full forward of its own prompt: ``[H_Q, k]``."""
    ids = torch.tensor([[*PROMPT[:SHARED], *suffix]])
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[layer][0].double()
    rows = weights[:, SHARED:]
    return torch.stack([rows[..., max(a, SINKS) : b].sum(-1).mean(-1) for a, b in CHUNKS], dim=-1)


def run_with_probes(made: Any, monitor: AsksProbes, **more: Any) -> PrefillRun:
    membership = chunk_membership(CHUNKS, N, first=SINKS)
    anatomy = made.installation.anatomy
    return PrefillRun(anatomy, N, monitor, membership, probes=Probes(anatomy, Bank(SHARED, SUFFIXES)), **more)


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_a_branch_equals_a_forward_of_the_probes_own_prompt(name: str, kernel: str, cached: bool) -> None:
    made = subject(name, kernel)
    monitor = AsksProbes((2, LAYER), torch.tensor([2, 0, 3, 1]))
    run = run_with_probes(made, monitor, stop_when_known=not cached)
    try:
        with one_thread(), made.installation.activate(run):
            if cached:
                greedy(made.model, PROMPT, steps=1)
            else:
                with torch.no_grad(), pytest.raises(ForwardFinished):
                    made.installation.anatomy.decoder(input_ids=torch.tensor([PROMPT]), use_cache=False)
        assert run.refusal is None, run.refusal
        reference = shared(name, "eager")
        with one_thread():
            for layer in monitor.layers:
                for at, place in enumerate(monitor.places.tolist()):
                    wanted = expected(reference, layer, SUFFIXES[place])
                    assert wanted.sum(-1).max() > 0.05, "the probe looks at the documents"
                    torch.testing.assert_close(monitor.masses[layer][:, at], wanted, atol=2e-6, rtol=0)
    finally:
        made.installation.close()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("prune", [False, True])
def test_the_prompts_own_answer_is_the_very_same_with_probes(name: str, kernel: str, prune: bool) -> None:
    kept = torch.tensor([i for i in range(N) if not 10 <= i < 15]) if prune else None

    class Silent(AsksProbes):
        def observe(self, layer: int, read: Any) -> Any:
            return Decision(self.kept is not None, self.kept)

    def answer(monitor: AsksProbes) -> Any:
        made = subject(name, kernel)
        with one_thread(), made.installation.activate(run_with_probes(made, monitor)):
            outcome = greedy(made.model, PROMPT)
        made.installation.close()
        return outcome

    places = torch.arange(4)
    random_state, torch_state = random.getstate(), torch.get_rng_state()
    asked, silent = answer(AsksProbes((2,), places, kept)), answer(Silent((2,), places, kept))
    assert asked.tokens == silent.tokens
    assert torch.equal(asked.logits, silent.logits)
    assert random.getstate() == random_state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert ACTIVE_RUN.get() is None


def test_keys_and_values_are_views_and_are_forgotten_once_the_outcome_is_known() -> None:
    made = subject("llama", "sdpa")
    monitor = AsksProbes((2,), torch.arange(4))
    run = run_with_probes(made, monitor)
    noted = []
    keep = run.probes.keep  # type: ignore[union-attr]

    def watch(layer: int, key: Tensor, value: Tensor) -> None:
        keep(layer, key, value)
        held = run.probes._kept[layer]  # type: ignore[union-attr]
        noted.append((layer, held.keys.data_ptr() == key.data_ptr(), held.values.data_ptr() == value.data_ptr()))

    run.probes.keep = watch  # type: ignore[method-assign,union-attr]
    above: list[int] = []
    handle = made.installation.anatomy.layers[LAYER].register_forward_pre_hook(
        lambda *_: above.append(len(run.probes._kept))  # type: ignore[union-attr]
    )
    with one_thread(), made.installation.activate(run):
        greedy(made.model, PROMPT, steps=1)
    handle.remove()
    made.installation.close()
    assert noted == [(0, True, True), (1, True, True), (2, True, True)]
    assert set(above) == {0}


def test_a_window_keeps_no_more_keys_than_a_probe_can_see() -> None:
    made = subject("gemma3", "sdpa")
    probes = Probes(made.installation.anatomy, Bank(SHARED, SUFFIXES))
    key = torch.zeros(1, 2, N, 8)
    probes.keep(0, key, key)
    probes.keep(5, key, key)
    assert FAMILIES["gemma3"].windows[0] == 12
    assert (probes._kept[0].held, probes._kept[5].held) == (11, SHARED)
    made.installation.close()


def test_many_probes_are_cut_into_packs_and_give_what_each_gives_alone() -> None:
    made = subject("qwen3", "sdpa")
    suffixes = {place: tuple(ids_of(place, 60)) for place in range(9)}
    assert sum(map(len, suffixes.values())) > 2 * PACK_TOKENS
    together: dict[str, Tensor] = {}
    for name, asked in (("all", [range(9)]), ("each", [[place] for place in range(9)])):

        class Asks(AsksProbes):
            def observe(self, layer: int, read: Any, asked: Any = asked, name: str = name) -> Any:
                together[name] = torch.cat([read.probes(torch.tensor(list(places))) for places in asked], dim=1)
                return Decision(False, None)

        anatomy = made.installation.anatomy
        membership = chunk_membership(CHUNKS, N, first=SINKS)
        probes = Probes(anatomy, Bank(SHARED, suffixes))
        run = PrefillRun(anatomy, N, Asks((3,), torch.arange(9)), membership, probes=probes)
        with one_thread(), made.installation.activate(run):
            greedy(made.model, PROMPT, steps=1)
    made.installation.close()
    torch.testing.assert_close(together["all"], together["each"], atol=2e-6, rtol=0)


def test_a_cancelled_run_leaves_in_the_middle_of_a_probe() -> None:
    made = subject("llama", "sdpa")
    monitor = AsksProbes((3,), torch.arange(4))
    run = run_with_probes(made, monitor)
    entered = []

    def cancel(module: Any, args: Any, kwargs: Any) -> None:
        entered.append(1)
        if len(entered) == 2:  # the second entry of layer 1 is the branch's
            run.cancelled.set()

    handle = made.installation.anatomy.layers[1].register_forward_pre_hook(cancel, with_kwargs=True)
    with one_thread(), made.installation.activate(run), pytest.raises(RunCancelled):
        greedy(made.model, PROMPT, steps=1)
    handle.remove()
    assert ACTIVE_RUN.get() is None
    made.installation.close()


def test_padding_is_refused() -> None:
    made = subject("llama", "sdpa")
    run = run_with_probes(made, AsksProbes((2,), torch.arange(4)))
    with one_thread(), made.installation.activate(run):
        greedy(made.model, PROMPT, padding=3, steps=1)
    made.installation.close()
    assert run.refusal is not None
    assert run.refusal.code == "probe_padding"


# -- through a backend -------------------------------------------------------------------------------------------------

QUERIES = (
    "Which word is it?",
    "Who wrote <|im_end|> the third document?",
    "What is in there \N{EURO SIGN}",
    "And why?",
)


def asking(*more: Any, queries: tuple[str, ...] = QUERIES, **audit: Any) -> PruningConfig:
    settings = {"eps_audit": 0.95, "m_a": 64, **audit}
    return tiny.LOOSE.model_copy(
        update={"audit": AuditConfig(observers=(ProbeQueries(queries=queries), *more), **settings)}
    )


def made_backend(**options: Any) -> LocalBackend:
    return LocalBackend(tiny.model(**options), tiny.tokenizer())


def test_a_probe_is_laid_out_as_the_prompt_with_another_question_would_be() -> None:
    segments, style = SegmentTokenizer(tiny.tokenizer()), PromptStyle()
    request = tiny.request(history=[("user", "hello"), ("assistant", "there")])
    layout = build_layout(request, segments, style=style, sink_tokens=4, max_positions=None)
    bank = lay_out(request, dict(enumerate(QUERIES)), layout, segments, style)
    assert bank is not None
    for place, query in enumerate(QUERIES):
        other = request.model_copy(update={"query": query})
        whole = build_layout(other, segments, style=style, sink_tokens=4, max_positions=None)
        assert (*layout.input_ids[: bank.shared], *bank.suffixes[place]) == whole.input_ids
        assert len(set(bank.suffixes[place]) & segments.forbidden) <= 2  # those of the template: turn ends and begins
        assert bank.suffixes[place].count(257) == 1, "a question cannot end its own turn"


def test_documents_that_say_nothing_do_not_change_a_probes_tokens() -> None:
    segments, style = SegmentTokenizer(tiny.tokenizer()), PromptStyle()
    request = tiny.request()
    blank = request.model_copy(update={"chunks": (*request.chunks, Chunk(id="blank", text=" "))})
    layout = build_layout(blank, segments, style=style, sink_tokens=4, max_positions=None)
    bank = lay_out(blank, {0: QUERIES[0]}, layout, segments, style)
    assert bank is not None
    other = blank.model_copy(update={"query": QUERIES[0]})
    whole = build_layout(other, segments, style=style, sink_tokens=4, max_positions=None)
    assert (*layout.input_ids[: bank.shared], *bank.suffixes[0]) == whole.input_ids


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("filter_mode", [True, False])
def test_what_a_backend_audits_equals_full_forwards_of_the_probes_prompts(kernel: str, filter_mode: bool) -> None:
    request, config = tiny.request(), asking()
    with one_thread(), made_backend(kernel=kernel) as backend:
        record = (backend.prune if filter_mode else backend.generate)(
            request, config, **({} if filter_mode else {"max_new_tokens": 2})
        ).audit
        layout = backend.layout(request, config)
    assert record.outcome == "pruned"
    (audit,) = record.trials[-1].audits
    assert (audit.observer, audit.method, audit.m) == ("probe_queries", "enumerate", 4)
    assert audit.retained_share is None
    assert not audit.caps_imply
    plain, losses = tiny.model("eager"), []
    for query in QUERIES:
        with made_backend() as other:
            ids = other.layout(request.model_copy(update={"query": query}), config).input_ids
        with torch.no_grad(), one_thread():
            weights = plain(torch.tensor([ids]), output_attentions=True).attentions[record.accepted_layer][0]
        gone = [t for i in record.trials[-1].removed for t in range(*layout.chunk_spans[i])]
        losses.append(weights[:, layout.suffix_span[0] :, gone].double().sum(-1).mean(-1))
    assert audit.eta_hat == pytest.approx(torch.stack(losses).mean(0).tolist(), abs=2e-6)


def test_a_bank_larger_than_the_number_drawn_is_sampled_and_each_probe_runs_once() -> None:
    queries = tuple(f"What is word {i}?" for i in range(100))
    config = asking(queries=queries, m_a=90, bound="betting")
    with one_thread(), made_backend() as backend:
        job = backend._prepare(tiny.request(), config, {"max_new_tokens": 1})
        asked: list[int] = []
        read = job.run.probes.read  # type: ignore[union-attr]

        def counting(layer: int, places: Tensor, *rest: Any) -> Tensor:
            asked.extend(places.tolist())
            return read(layer, places, *rest)

        job.run.probes.read = counting  # type: ignore[method-assign,union-attr]
        record = backend._answer(job).audit
    assert record.outcome == "pruned"
    (observer,) = record.audit.observers  # type: ignore[union-attr]
    assert (observer.kind, observer.support, observer.method, len(observer.rows)) == (
        "probe_queries",
        100,
        "sample",
        90,
    )
    assert sorted(asked) == sorted(set(observer.rows))
    assert record.claims.probabilistic
    assert "a bank of 100 questions" in record.claims.probabilistic


def test_a_sequential_audit_runs_only_the_probes_it_looks_at() -> None:
    queries = tuple(f"What is word {i}?" for i in range(300))
    config = asking(queries=queries, sequential=True, m_a=250, eps_audit=0.95)
    with one_thread(), made_backend() as backend:
        job = backend._prepare(tiny.request(), config, {"max_new_tokens": 1})
        asked: list[int] = []
        read = job.run.probes.read  # type: ignore[union-attr]

        def counting(layer: int, places: Tensor, *rest: Any) -> Tensor:
            asked.extend(places.tolist())
            return read(layer, places, *rest)

        job.run.probes.read = counting  # type: ignore[method-assign,union-attr]
        record = backend._answer(job).audit
    (audit,) = record.trials[-1].audits
    assert audit.ended == "passed"
    assert audit.announced == 250
    assert audit.m < 100
    looked = record.audit.observers[0].rows[: audit.m]  # type: ignore[union-attr]
    assert sorted(asked) == sorted(set(looked))


def test_probes_are_left_alone_where_cheaper_observers_have_failed() -> None:
    config = asking(SuffixRows(), eps_audit=1e-6, method="enumerate")
    with one_thread(), made_backend() as backend:
        job = backend._prepare(tiny.request(), config, {"max_new_tokens": 1})
        job.run.probes.read = None  # type: ignore[method-assign,union-attr,assignment]
        record = backend._answer(job).audit
    assert [trial.verdict.code for trial in record.trials] == ["audit_failed", "audit_failed"]
    assert [[audit.observer for audit in trial.audits] for trial in record.trials] == [["suffix_rows"]] * 2


def test_a_record_names_probes_by_digest_unless_text_is_asked_for() -> None:
    config = asking(PromptRows())
    with one_thread(), made_backend() as backend:
        record = backend.prune(tiny.request(), config).audit
        telling = backend.prune(tiny.request(), config.model_copy(update={"include_text": True})).audit
    bank = record.config["audit"]["observers"][0]
    assert bank["queries"] == list(config.audit.observers[0].digests)
    assert len(set(bank["queries"])) == 4
    assert all(len(name) == len("sha256:") + 16 for name in bank["queries"])
    text = record.to_json()
    assert not [query for query in QUERIES if json.dumps(query)[1:-1] in text]
    assert AuditRecord.from_json(text) == record
    assert telling.config["audit"]["observers"][0]["queries"] == list(QUERIES)
    assert PruningConfig.model_validate_json(config.model_dump_json()) == config
    assert PruningConfig.model_validate(telling.config).audit == config.audit
    assert PruningConfig.model_validate(record.config).audit != config.audit


def test_the_users_own_question_may_be_a_probe_and_then_loses_what_the_suffix_loses() -> None:
    request = tiny.request()
    config = asking(SuffixRows(), queries=(request.query, request.query + " "))
    config = config.model_copy(update={"audit": config.audit.model_copy(update={"method": "enumerate"})})
    with one_thread(), made_backend() as backend:
        job = backend._prepare(request, config, {"max_new_tokens": 1})
        own: list[Tensor] = []
        read = job.run.probes.read  # type: ignore[union-attr]

        def keeping(layer: int, places: Tensor, *rest: Any) -> Tensor:
            own.append(read(layer, places, *rest))
            return own[-1]

        job.run.probes.read = keeping  # type: ignore[method-assign,union-attr]
        record = backend._answer(job).audit
    trial = record.trials[-1]
    suffix = next(audit for audit in trial.audits if audit.observer == "suffix_rows")
    mine = own[-1][:, 0, list(trial.removed)].sum(-1)
    assert suffix.eta_hat == pytest.approx(mine.tolist(), abs=2e-6)


def full(backend: LocalBackend, config: PruningConfig, **generation: Any) -> AuditRecord:
    result = backend.generate(tiny.request(), config, max_new_tokens=2, **generation)
    plain = backend.generate(tiny.request(), PruningConfig(enabled=False), max_new_tokens=2)
    assert result.answer == plain.answer
    assert result.audit.outcome == "bypassed"
    return result.audit


def test_a_probe_longer_than_the_models_positions_bypasses() -> None:
    with one_thread(), made_backend() as backend:
        record = full(backend, asking(queries=("Short?", "long " * 500)))
    assert record.reason.code == "probe_length"
    assert "2048" in record.reason.message


def test_hidden_states_asked_for_bypass() -> None:
    with one_thread(), made_backend() as backend:
        record = full(backend, asking(), output_hidden_states=True, return_dict_in_generate=True)
    assert record.reason.code == "probe_outputs"


def test_a_kernel_without_masks_bypasses() -> None:
    with one_thread(), made_backend() as backend:
        object.__setattr__(backend.anatomy, "kernel", "flash_attention_2")
        try:
            found = probes_for(
                tiny.request(),
                asking(),
                backend.layout(tiny.request()),
                (0, 1),
                anatomy=backend.anatomy,
                segments=backend._segments,
                style=backend.style,
            )
        finally:
            object.__setattr__(backend.anatomy, "kernel", "sdpa")
    assert isinstance(found, Reason)
    assert found.code == "probe_kernel"


def test_a_template_that_writes_the_time_before_the_documents_bypasses() -> None:
    with one_thread(), made_backend() as backend:
        backend.tokenizer.chat_template = tiny.CHATML.replace("{% for", "{{ strftime_now('%f') }}{% for", 1)
        record = backend.generate(tiny.request(), asking(), max_new_tokens=2).audit
    assert (record.outcome, record.reason.code) == ("bypassed", "probe_template")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotation_that_follows_the_prompts_length_bypasses_only_where_it_changes(kind: str) -> None:
    with one_thread(), made_backend() as backend:
        config = backend.anatomy.config
        table = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
        name = "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling"
        before = getattr(config, name)
        for limit, refused in ((100, True), (2000, False)):
            # Set behind the model's back: its rotation was made when it was.
            config.__dict__[name] = {**table, "original_max_position_embeddings": limit}
            found = probes_for(
                tiny.request(),
                asking(),
                backend.layout(tiny.request()),
                (0, 1),
                anatomy=backend.anatomy,
                segments=backend._segments,
                style=backend.style,
            )
            assert (isinstance(found, Reason) and found.code == "probe_length") is refused
        config.__dict__[name] = before


def test_threads_with_probes_do_not_see_each_other() -> None:
    requests = [
        RagRequest(chunks=tiny.request().chunks, query=f"Question {i}, then?", instruction="Answer.") for i in range(3)
    ]
    config = asking(seed=5)
    with one_thread(), made_backend() as backend:
        alone = [backend.generate(r, config, max_new_tokens=3) for r in requests]
        results: dict[int, Any] = {}
        workers = [
            threading.Thread(
                target=lambda i=i: results.update({i: backend.generate(requests[i], config, max_new_tokens=3)})
            )
            for i in range(3)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for i, one in enumerate(alone):
        assert results[i].answer == one.answer
        assert results[i].audit.trials[-1].audits[0].eta_hat == one.audit.trials[-1].audits[0].eta_hat


def test_a_model_on_which_a_backend_ran_probes_is_as_it_was() -> None:
    model = build("llama", "sdpa")
    plain = greedy(model, PROMPT)
    made = subject("llama", "sdpa")
    with one_thread(), made.installation.activate(run_with_probes(made, AsksProbes((2,), torch.arange(4)))):
        greedy(made.model, PROMPT, steps=1)
    made.installation.close()
    after = greedy(made.model, PROMPT)
    assert plain.tokens == after.tokens
    assert torch.equal(plain.logits, after.logits)


@pytest.mark.slow
@pytest.mark.model
def test_what_a_bank_of_64_costs_on_a_prompt_of_a_thousand_tokens(
    smollm2: tuple[Any, Any], smoke_questions: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    bank = tuple(f"{item['question']} ({turn})" for turn in range(16) for item in smoke_questions)[:64]
    longest = max(smoke_questions, key=lambda item: sum(len(chunk["text"]) for chunk in item["chunks"]))
    chunks = [Chunk(id=str(i), text=chunk["text"]) for i, chunk in enumerate(longest["chunks"])]
    audit = AuditConfig(observers=(ProbeQueries(queries=bank),), eps_audit=0.9, m_a=64)
    config = PruningConfig(layers=(15,), eps_row=0.9, min_saving=0.01, mass_min=0.0, mu_min=1e-6, audit=audit)
    with one_thread(), LocalBackend(*smollm2) as backend:
        while backend.layout(RagRequest(chunks=chunks, query="What?")).n_tokens > 1024:
            chunks = chunks[:-1]
        request = RagRequest(chunks=chunks, query=longest["question"])
        job = backend._prepare(request, config, {"max_new_tokens": 1})
        spent: list[float] = []
        read = job.run.probes.read  # type: ignore[union-attr]

        def timed(*given: Any) -> Tensor:
            started = time.thread_time()
            masses = read(*given)
            spent.append(time.thread_time() - started)
            return masses

        job.run.probes.read = timed  # type: ignore[method-assign,union-attr]
        record = backend._answer(job).audit
        started = time.thread_time()
        backend.generate(request, PruningConfig(enabled=False), max_new_tokens=1)
        whole = time.thread_time() - started
    assert record.trials[-1].audits[0].m == 64
    tokens = sum(map(len, job.run.probes._bank.suffixes.values()))  # type: ignore[union-attr]
    linear = tokens / record.prompt.tokens * 16 / 30
    with capsys.disabled():
        sys.stdout.write(
            f"\n64 probes, {tokens} tokens, over {record.prompt.tokens} tokens, read at layer 15 of 30: "
            f"{sum(spent) / whole:.2f} of a full prefill (linear part: {linear:.2f})\n"
        )
    assert sum(spent) / whole < 4 * linear
