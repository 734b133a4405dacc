"""What users of both frameworks complained about in public, tried on ours."""

import asyncio
import copy
import gc
import json
import pickle
import random
import warnings

import numpy as np
import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("langchain_core")

import lc_cases
import llama_cases
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import TypeAdapter
from tiny import model, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.errors import RequestError
from entroprefill_rag.integrations import langchain as lc
from entroprefill_rag.integrations import llama_index as li

QUERY = llama_cases.QUERY
SHORT = {"max_new_tokens": 5}


class Found(BaseRetriever):
    """Finds the same nodes for every question."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle):
        return list(self.nodes)


@pytest.fixture(autouse=True)
def nothing_global(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = (Settings._llm, Settings._callback_manager)
    Settings._llm = Settings._callback_manager = None
    yield
    Settings._llm, Settings._callback_manager = before


@pytest.fixture
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made


@pytest.fixture
def nodes():
    return llama_cases.make_nodes()


@pytest.fixture
def documents():
    return lc_cases.make_documents()


@pytest.fixture
def pp(backend):
    return li.EntroPrefillPostprocessor(backend=backend, config=llama_cases.SEEDED)


@pytest.fixture
def compressor(backend):
    return lc.EntroPrefillCompressor(backend=backend, pruning=lc_cases.SEEDED)


def engine_over(nodes, backend, **more):
    return li.EntroPrefillQueryEngine.from_args(
        Found(nodes), backend, config=llama_cases.SEEDED, generation=SHORT, **more
    )


def test_each_score_is_that_of_its_own_node(backend, nodes, documents):
    """run-llama/llama_index#20597: a reranker gave scores to the wrong nodes, by position in another order."""
    nodes.insert(2, NodeWithScore(node=TextNode(text="", id_="empty")))
    documents.insert(2, Document(id="empty", page_content=""))
    random.Random(3).shuffle(nodes)
    random.Random(3).shuffle(documents)
    pp = li.EntroPrefillPostprocessor(backend=backend, config=llama_cases.SEEDED, replace_score=True)
    scoring = lc.EntroPrefillCompressor(backend=backend, pruning=lc_cases.SEEDED, add_relevance_score=True)
    kept_nodes = pp.postprocess_nodes(nodes, query_str=QUERY)
    kept_documents = scoring.compress_documents(documents, QUERY)
    for record, found in (
        (li.get_audit(kept_nodes), {node.node_id: node.score for node in kept_nodes}),
        (lc.get_audit(kept_documents), {each.id: each.metadata["relevance_score"] for each in kept_documents}),
    ):
        scored = {chunk.id: score for chunk, score in zip(record.prompt.chunks, record.trial.scores, strict=True)}
        assert len(set(scored.values())) > 3
        assert found == {chunk_id: scored[chunk_id] for chunk_id in record.retained_ids}


def test_a_streamed_chat_goes_on_where_nothing_was_found(backend):
    """run-llama/llama_index#11698 and #9873: with no nodes, a streaming engine's answer could not be streamed."""
    chat = CondenseQuestionChatEngine.from_defaults(engine_over([], backend, streaming=True), llm=MockLLM())

    async def asynchronous():
        return "".join([piece async for piece in (await chat.astream_chat(QUERY)).async_response_gen()])

    assert "".join(chat.stream_chat(QUERY).response_gen) == "Empty Response"
    assert asyncio.run(asynchronous()) == "Empty Response"


def test_scores_that_a_retriever_gave_as_numpy_numbers_reach_a_web_service(backend, nodes):
    """run-llama/llama_index#16743 and #10780: float32 scores broke to_json and FastAPI's answer."""
    for node in nodes:
        node.score = np.float32(node.score)
    pp = li.EntroPrefillPostprocessor(backend=backend, config=llama_cases.SEEDED)
    synthesizer = pp.synthesizer(**SHORT)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    handed = synthesizer.synthesize(QUERY, kept)
    whole = engine_over(nodes, backend).query(QUERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in (kept, handed.source_nodes, whole.source_nodes):
            assert found
            assert all(type(node.score) is float for node in found)
            json.loads(TypeAdapter(list[NodeWithScore]).dump_json(list(found)))
            json.loads(found[0].to_json())
        json.dumps([handed.metadata, whole.metadata])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_handlers_that_look_at_every_event_leave_the_stream_to_the_user(backend, nodes, asynchronous):
    """run-llama/llama_index#12031: an event handler read the stream to its end before the user got it."""

    class Nosy(BaseEventHandler):
        @classmethod
        def class_name(cls):
            return "Nosy"

        def handle(self, event, **kwargs):
            seen.append(repr(event))
            seen.append(str(event.model_dump()))
            copy.copy(event)

    seen: list[str] = []
    root = get_dispatcher()
    root.event_handlers.append(Nosy())
    debug = LlamaDebugHandler(print_trace_on_end=False)
    engine = engine_over(nodes, backend, streaming=True, callback_manager=CallbackManager([debug]))

    async def read():
        return [piece async for piece in (await engine.aquery(QUERY)).response_gen]

    try:
        pieces = asyncio.run(read()) if asynchronous else list(engine.query(QUERY).response_gen)
    finally:
        root.event_handlers.pop()
    assert any("SynthesizeEndEvent" in each for each in seen)
    assert len(pieces) > 2
    assert "".join(pieces) == engine_over(nodes, backend).query(QUERY).response
    starts, ends = debug.get_llm_inputs_outputs()[0]
    assert starts.payload
    assert ends.payload


def test_one_object_serves_one_event_loop_after_another(backend, nodes, pp):
    """run-llama/llama_index#21150 (pull request #21184): an async client stayed bound to the loop it was made in.

    And #9978: blocking calls failed where a loop runs already, as in a notebook.
    """
    synthesizer = pp.synthesizer(**SHORT)
    compressor = lc.EntroPrefillCompressor(backend=backend, pruning=lc_cases.SEEDED)
    documents = lc_cases.make_documents()

    async def once():
        response = await synthesizer.asynthesize(QUERY, await pp.apostprocess_nodes(nodes, query_str=QUERY))
        return response.response, lc_cases.ids(await compressor.acompress_documents(documents, QUERY))

    async def blocking():
        response = synthesizer.synthesize(QUERY, pp.postprocess_nodes(nodes, query_str=QUERY))
        return response.response, lc_cases.ids(compressor.compress_documents(documents, QUERY))

    found = [asyncio.run(once()), asyncio.run(once()), asyncio.run(blocking())]
    assert found[0] == found[1] == found[2]
    assert found[0][0]


@pytest.mark.parametrize("copied", ["pickle", "deepcopy"])
def test_an_engine_can_be_pickled_and_copied(backend, nodes, copied):
    """run-llama/llama_index#8048: pickling a query engine raised on objects deep inside it."""
    index = VectorStoreIndex([node.node for node in nodes], embed_model=MockEmbedding(embed_dim=4))
    pp = li.EntroPrefillPostprocessor(backend=backend, config=llama_cases.SEEDED)
    handing = index.as_query_engine(
        node_postprocessors=[pp], response_synthesizer=pp.synthesizer(**SHORT), similarity_top_k=5
    )
    plain = li.EntroPrefillQueryEngine.from_args(
        index, backend, config=llama_cases.SEEDED, generation=SHORT, similarity_top_k=5
    )
    expected = [engine.query(QUERY) for engine in (handing, plain)]
    make = copy.deepcopy if copied == "deepcopy" else lambda engine: pickle.loads(pickle.dumps(engine))
    others = [make(engine) for engine in (handing, plain)]
    del handing, plain, pp
    gc.collect()
    for other, before in zip(others, expected, strict=True):
        response = other.query(QUERY)
        assert response.response == before.response
        assert response.audit.outcome == "pruned"
        assert response.metadata["entroprefill"]["mode"] == before.metadata["entroprefill"]["mode"]
        assert other._response_synthesizer._llm.complete("Hello?", max_new_tokens=2).text


def test_citations_of_retained_nodes_are_cut_from_them_alone(pp, nodes):
    """run-llama/llama_index#17439: cutting a node for citations changed the node itself, so texts came twice."""
    before = copy.deepcopy(nodes)
    cut = TokenTextSplitter(chunk_size=8, chunk_overlap=0)  # the default one wants data of nltk's
    engine = CitationQueryEngine(Found(nodes), llm=MockLLM(), node_postprocessors=[pp], text_splitter=cut)
    response = engine.query(QUERY)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    texts = [node.node.get_content() for node in response.source_nodes]
    assert nodes == before
    assert len(texts) > len(kept)
    assert len(set(texts)) == len(texts)
    words = {word for text in texts for word in text.split() if word.startswith("word")}
    assert words == {word for node in kept for word in node.node.text.split()}


def test_token_counting_and_traces_see_choice_and_model_call(backend, nodes):
    """run-llama/llama_index#13450 and #16311: no callbacks from postprocessors, and a counter that stayed at zero."""
    counter, debug = TokenCountingHandler(), LlamaDebugHandler(print_trace_on_end=False)
    Settings.callback_manager = CallbackManager([counter, debug])
    index = VectorStoreIndex([node.node for node in nodes], embed_model=MockEmbedding(embed_dim=4))
    pp = li.EntroPrefillPostprocessor(backend=backend, config=llama_cases.SEEDED)
    engine = index.as_query_engine(
        node_postprocessors=[pp], response_synthesizer=pp.synthesizer(**SHORT), similarity_top_k=5
    )
    response = engine.query(QUERY)
    for kind in (CBEventType.RERANKING, CBEventType.LLM, CBEventType.SYNTHESIZE):
        assert len(debug.get_event_pairs(kind)) == 1, kind
    assert counter.prompt_llm_token_count == response.audit.prompt.tokens
    assert counter.completion_llm_token_count == SHORT["max_new_tokens"]


def test_a_compressor_keeps_ids_and_metadata(compressor):
    """langchain-ai/langchain#19142 and langchain-ai/langchain-cohere#131: rerankers dropped metadata and ids."""
    retrievers = pytest.importorskip("langchain_classic.retrievers")
    documents = [
        each.model_copy(
            update={"metadata": {"source": f"{each.id}.md", "deep": {"pages": [at]}, "relevance_score": at}}
        )
        for at, each in enumerate(lc_cases.make_documents())
    ]
    retriever = retrievers.ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=lc_cases.Fixed(found=documents)
    )
    kept = retriever.invoke(QUERY)
    assert 0 < len(kept) < len(documents)
    assert kept == [each for each in documents if each.id in lc_cases.ids(kept)]


def test_an_empty_list_is_no_error_anywhere(backend, compressor):
    """langchain-ai/langchain#31192 and #5304, microsoft/LLMLingua#14: an empty list of documents raised."""
    retrievers = pytest.importorskip("langchain_classic.retrievers")
    retriever = retrievers.ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=lc_cases.Fixed(found=[])
    )
    assert retriever.invoke(QUERY) == []
    assert compressor.compress_documents([], QUERY) == []
    assert compressor.as_runnable().invoke({"input": QUERY, "context": []}) == []
    answered = lc.EntroPrefillRunnable(backend=backend, max_tokens=3).invoke({"input": QUERY, "context": []})
    assert (answered["context"], answered["dropped"]) == ([], [])
    assert answered["answer"]
    assert lc.ChatEntroPrefill(backend=backend, max_tokens=3).invoke(QUERY, documents=[]).content
    assert engine_over([], backend).query(QUERY).response == "Empty Response"


def test_a_retriever_run_ends_with_its_documents_or_its_error(compressor, documents):
    """langchain-ai/langchain#7290: on_retriever_end was not called, so callbacks waited for ever."""
    retrievers = pytest.importorskip("langchain_classic.retrievers")

    class Runs(BaseCallbackHandler):
        def __init__(self):
            self.begun, self.ended = [], []

        def on_retriever_start(self, serialized, query, *, run_id, **kwargs):
            self.begun.append(run_id)

        def on_retriever_end(self, found, *, run_id, **kwargs):
            self.ended.append((run_id, found))

        def on_retriever_error(self, error, *, run_id, **kwargs):
            self.ended.append((run_id, error))

    retriever = retrievers.ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=lc_cases.Fixed(found=documents)
    )
    runs = Runs()
    kept = retriever.invoke(QUERY, {"callbacks": [runs]})
    assert asyncio.run(retriever.ainvoke(QUERY, {"callbacks": [runs]})) == kept
    for call in (retriever.invoke, lambda *args: asyncio.run(retriever.ainvoke(*args))):
        with pytest.raises(RequestError, match="blank"):
            call(" ", {"callbacks": [runs]})
    assert sorted(runs.begun) == sorted(run_id for run_id, _ in runs.ended)
    last = dict(runs.ended)
    outer = [found for found in last.values() if found == kept or isinstance(found, RequestError)]
    assert [isinstance(found, RequestError) for found in outer] == [False, False, True, True]


def test_an_answer_streams_through_a_chain_that_has_the_filter_in_it(compressor, backend, documents):
    """langchain-ai/langchain#13126: a lambda in a chain turned its stream into one piece."""
    chat = lc.ChatEntroPrefill(backend=backend, max_tokens=24, temperature=0)
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
    told = RunnableLambda(lambda given: {**given, "context": "\n".join(each.page_content for each in given["context"])})
    chain = RunnablePassthrough.assign(context=compressor.as_runnable()) | told | prompt | chat

    async def asynchronous():
        return [chunk.content async for chunk in chain.astream({"input": QUERY, "context": documents})]

    pieces = [chunk.content for chunk in chain.stream({"input": QUERY, "context": documents})]
    whole = chain.invoke({"input": QUERY, "context": documents})
    assert isinstance(whole, AIMessage)
    for found in (pieces, asyncio.run(asynchronous())):
        assert len([piece for piece in found if piece]) > 2
        assert "".join(found) == whole.content
