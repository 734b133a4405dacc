"""Events: balanced on every path, small, and there in a real OpenTelemetry exporter."""

import asyncio
import gc
import json

import pytest
from llama_cases import QUERY, SEEDED, ids
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.callbacks.base_handler import BaseCallbackHandler

from entroprefill_rag.integrations.llama_index import (
    EntroPrefillPostprocessor,
    EntroPrefillQueryEngine,
    EntroPrefillSynthesizer,
)

GENERATION = {"max_new_tokens": 3}
PAIRS = [
    ("ReRankStartEvent", "ReRankEndEvent"),
    ("LLMCompletionStartEvent", "LLMCompletionEndEvent"),
    ("SynthesizeStartEvent", "SynthesizeEndEvent"),
]


class Legacy(BaseCallbackHandler):
    """Keeps what started and what ended."""

    def __init__(self):
        super().__init__([], [])
        self.started, self.ended = {}, {}

    def on_event_start(self, event_type, payload=None, event_id="", parent_id="", **kwargs):
        self.started[event_id] = (event_type, payload)
        return event_id

    def on_event_end(self, event_type, payload=None, event_id="", **kwargs):
        self.ended[event_id] = (event_type, payload)

    def start_trace(self, trace_id=None):
        pass

    def end_trace(self, trace_id=None, trace_map=None):
        pass

    def kinds(self):
        return sorted(kind.value for kind, _ in self.started.values())


@pytest.fixture
def legacy():
    return Legacy()


@pytest.fixture
def pp(backend, legacy):
    return EntroPrefillPostprocessor(
        backend=backend, config=SEEDED, callback_manager=CallbackManager([legacy]), mode="auto"
    )


def balanced(written, legacy=None):
    counts = {name: len(written.of(name)) for pair in PAIRS for name in pair}
    assert all(counts[start] == counts[end] for start, end in PAIRS), counts
    if legacy is not None:
        assert set(legacy.started) == set(legacy.ended)
    return counts


def test_f12_a_filter_tells_start_end_and_audit(pp, nodes, written, legacy):
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    assert written.names() == ["ReRankStartEvent", "EntroPrefillAuditEvent", "ReRankEndEvent"]
    start, audit, end = written.events
    assert (start.model_name, start.top_n) == ("tiny", len(nodes))
    assert start.nodes == nodes
    assert ids(end.nodes) == ids(kept)
    assert audit.audit["retained_ids"] == ids(kept)
    assert legacy.kinds() == ["reranking"]
    balanced(written, legacy)
    [(_, payload)] = legacy.ended.values()
    assert payload[EventPayload.NODES] is kept


def test_f12_an_answer_tells_of_the_model_call_with_its_usage(backend, nodes, written):
    synthesizer = EntroPrefillSynthesizer(backend, config=SEEDED, generation=GENERATION)
    response = synthesizer.synthesize(QUERY, nodes)
    counts = balanced(written)
    assert counts["LLMCompletionEndEvent"] == 1
    [start], [end] = written.of("LLMCompletionStartEvent"), written.of("LLMCompletionEndEvent")
    assert QUERY in start.prompt
    assert nodes[0].node.text in start.prompt
    assert start.additional_kwargs == GENERATION
    assert end.response.text == response.response
    usage = end.response.raw["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["prompt_tokens"] == response.audit.prompt.tokens
    assert len(written.of("EntroPrefillAuditEvent")) == 1


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_f12_every_path_is_balanced_and_audits_once(pp, nodes, written, handed, streaming, asynchronous):
    pp.mode = "handoff" if handed else "filter"
    synthesizer = pp.synthesizer(streaming=streaming, **GENERATION)

    async def run():
        kept = await pp.apostprocess_nodes(nodes, query_str=QUERY) if handed else nodes
        response = await synthesizer.asynthesize(QUERY, kept)
        if streaming:
            async for _ in response.response_gen:
                pass

    if asynchronous:
        asyncio.run(run())
    else:
        kept = pp.postprocess_nodes(nodes, query_str=QUERY) if handed else nodes
        response = synthesizer.synthesize(QUERY, kept)
        if streaming:
            list(response.response_gen)
    counts = balanced(written)
    assert counts["LLMCompletionEndEvent"] == 1
    assert counts["ReRankEndEvent"] == int(handed)
    assert len(written.of("EntroPrefillAuditEvent")) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_f12_errors_end_what_they_started(pp, backend, nodes, written, legacy, asynchronous):
    backend.model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    synthesizer = pp.synthesizer(**GENERATION)
    streaming = EntroPrefillSynthesizer(backend, config=SEEDED, streaming=True, generation=GENERATION)
    for each in (synthesizer, streaming):
        each.callback_manager = pp.callback_manager
        with pytest.raises(ZeroDivisionError):
            asyncio.run(each.asynthesize(QUERY, nodes)) if asynchronous else each.synthesize(QUERY, nodes)

    def post(*args, **kwargs):
        return (
            asyncio.run(pp.apostprocess_nodes(*args, **kwargs))
            if asynchronous
            else pp.postprocess_nodes(*args, **kwargs)
        )

    for mode in ("filter", "handoff"):
        pp.mode = mode
        with pytest.raises(ZeroDivisionError):
            post(nodes, query_str=QUERY)
    counts = balanced(written, legacy)
    assert (counts["ReRankEndEvent"], counts["LLMCompletionEndEvent"]) == (2, 2)
    assert {end.response.raw["finish_reason"] for end in written.of("LLMCompletionEndEvent")} == {"error"}
    errors = [payload[EventPayload.EXCEPTION] for kind, payload in legacy.ended.values() if kind == CBEventType.LLM]
    assert [type(error) for error in errors] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("read", [0, 1])
def test_f12_abandoned_streams_end_their_model_call(backend, nodes, written, read):
    endless = EntroPrefillSynthesizer(backend, config=SEEDED, streaming=True, generation={"max_new_tokens": 1500})
    response = endless.synthesize(QUERY, nodes)
    for _ in range(read):
        next(response.response_gen)
    assert not written.of("LLMCompletionEndEvent")
    # Events hold the response, as handlers of traces do not; let go of all of them but the end.
    written.events.clear()
    del response
    gc.collect()
    [end] = written.of("LLMCompletionEndEvent")
    assert end.response.raw == {"finish_reason": "cancelled"}


def test_f12_empty_lists_start_nothing_but_the_synthesis(backend, written):
    EntroPrefillSynthesizer(backend).synthesize(QUERY, [])
    assert balanced(written)["SynthesizeEndEvent"] == 1
    assert len(written.events) == 2


def test_f12_events_are_json_without_tensors(pp, nodes, written):
    pp.synthesizer(**GENERATION).synthesize(QUERY, pp.postprocess_nodes(nodes, query_str=QUERY))
    for event in written.events:
        if type(event).__name__ != "SynthesizeEndEvent":
            assert len(json.dumps(event.model_dump(mode="json"))) < 20_000


@pytest.mark.parametrize("streaming", [False, True])
def test_f12_opentelemetry_shows_reranking_model_call_and_audit(backend, index, streaming):
    otel = pytest.importorskip("llama_index.observability.otel.base")
    from llama_index.core.instrumentation import get_dispatcher
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    root = get_dispatcher()
    before = (list(root.span_handlers), list(root.event_handlers))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # As `LlamaIndexOpenTelemetry().start_registering()` does, but for a provider of this test's own.
    handler = otel.OTelCompatibleSpanHandler(tracer=provider.get_tracer("tests"))
    root.add_span_handler(handler)
    root.add_event_handler(otel.OTelCompatibleEventHandler(span_handler=handler))
    try:
        pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED)
        engine = index.as_query_engine(
            node_postprocessors=[pp],
            response_synthesizer=pp.synthesizer(streaming=streaming, **GENERATION),
            similarity_top_k=6,
        )
        response = engine.query(QUERY)
        if streaming:
            list(response.response_gen)
        # What another library traces next must not hang below a span of ours.
        assert not trace.get_current_span().get_span_context().is_valid
    finally:
        root.span_handlers[:], root.event_handlers[:] = before
    spans = {span.name: span for span in exporter.get_finished_spans()}
    events = {event.name: (span, event) for span in spans.values() for event in span.events}
    assert {"ReRankStartEvent", "ReRankEndEvent", "EntroPrefillAuditEvent"} <= set(events)
    assert {"LLMCompletionStartEvent", "LLMCompletionEndEvent"} <= set(events)
    call = spans["EntroPrefillLLM.answer"]
    assert call.events[0].name == "LLMCompletionStartEvent"
    assert call.events[-1].name == "LLMCompletionEndEvent"
    assert call.parent is not None
    assert spans["EntroPrefillPostprocessor._postprocess_nodes"].status.is_ok
    [root_span] = [span for span in spans.values() if span.parent is None and "query" in span.name]
    assert all(span.context.trace_id == root_span.context.trace_id for span in spans.values())
    assert events["EntroPrefillAuditEvent"][1].attributes["audit.outcome"] == "pruned"


def test_f12_one_engine_says_its_model_call_below_its_own_span(backend, index, written):
    EntroPrefillQueryEngine.from_args(index, backend, config=SEEDED, generation=GENERATION).query(QUERY)
    [start] = written.of("LLMCompletionStartEvent")
    assert start.span_id.startswith("EntroPrefillLLM.answer")
