"""In query engines, chat engines, tools and stores of LlamaIndex, over the project's own pages."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_cases import QUERY, SEEDED, ids
from llama_index.core import (
    MockEmbedding,
    Settings,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.evaluation import RetrieverEvaluator
from llama_index.core.llms import MockLLM
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from entroprefill_rag.errors import ConfigError, ModelSourceError
from entroprefill_rag.integrations.llama_index import (
    EntroPrefillLLM,
    EntroPrefillPostprocessor,
    EntroPrefillQueryEngine,
    EntroPrefillSynthesizer,
    backend_from_llm,
    get_audit,
)

TOP = {"similarity_top_k": 6}


@pytest.fixture
def pp(backend):
    return EntroPrefillPostprocessor(backend=backend, config=SEEDED)


@pytest.fixture
def engine(backend, index):
    return EntroPrefillQueryEngine.from_args(index, backend, config=SEEDED, generation={"max_new_tokens": 5}, **TOP)


def test_the_first_example_of_the_readme_needs_no_other_llm(pp, index):
    engine = index.as_query_engine(
        node_postprocessors=[pp], response_synthesizer=pp.synthesizer(max_new_tokens=5), **TOP
    )
    response = engine.query(QUERY)
    assert response.response
    assert response.metadata["entroprefill"]["handoff"]["taken"]
    assert len(response.source_nodes) < 6
    assert "text_qa_template" in str(list(engine.get_prompts()))
    assert asyncio.run(engine.aquery(QUERY)).response == response.response


def test_a_default_llm_that_somebody_chose_is_left_alone(pp):
    Settings.llm = chosen = MockLLM()
    pp.synthesizer()
    assert Settings.llm is chosen


@pytest.mark.parametrize("streaming", [False, True])
def test_f02_any_llm_query_engine_sync_async_and_streaming(pp, index, streaming):
    engine = index.as_query_engine(llm=MockLLM(), node_postprocessors=[pp], streaming=streaming, **TOP)

    async def asynchronous():
        response = await engine.aquery(QUERY)
        if streaming:
            async for _ in response.response_gen:
                pass
        return response

    for response in (engine.query(QUERY), asyncio.run(asynchronous())):
        assert 0 < len(response.source_nodes) < 6
        assert get_audit(response).outcome == "pruned"
        assert response.source_nodes[0]._trace.summary["mode"] == "filter"


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
def test_f02_chat_engines(pp, index, mode):
    chat = index.as_chat_engine(chat_mode=mode, llm=MockLLM(max_tokens=5), node_postprocessors=[pp], **TOP)
    response = chat.chat(QUERY)
    assert 0 < len(response.source_nodes) < 6
    assert get_audit(response).outcome == "pruned"
    again = asyncio.run(chat.achat("And then?"))
    assert get_audit(again)
    stream = chat.stream_chat("And then?")
    assert list(stream.response_gen)
    assert get_audit(stream)
    assert 0 < len(stream.source_nodes) < 6


def test_f02_retriever_tool_and_evaluator(pp, index):
    retriever = index.as_retriever(**TOP)
    tool = RetrieverTool.from_defaults(retriever, node_postprocessors=[pp])
    assert get_audit(tool.call(QUERY)).outcome == "pruned"
    evaluator = RetrieverEvaluator.from_metric_names(["hit_rate"], retriever=retriever, node_postprocessors=[pp])
    expected = ids(retriever.retrieve(QUERY))
    result = evaluator.evaluate(QUERY, expected_ids=expected)
    assert 0 < len(result.retrieved_ids) < 6


def test_an_engine_in_one_line_needs_no_setting(engine):
    assert Settings._llm is None
    response = engine.query(QUERY)
    assert response.response
    assert response.audit.outcome == "pruned"
    assert response.metadata["entroprefill"]["mode"] == "full"
    assert Settings._llm is None


def test_an_engine_takes_a_retriever_and_refuses_what_is_neither(backend, index):
    retriever = index.as_retriever(**TOP)
    engine = EntroPrefillQueryEngine.from_args(retriever, backend, config=SEEDED, generation={"max_new_tokens": 2})
    assert engine.query(QUERY).audit
    with pytest.raises(ConfigError, match="similarity_top_k"):
        EntroPrefillQueryEngine.from_args(retriever, backend, similarity_top_k=3)
    with pytest.raises(ConfigError, match="as_retriever"):
        EntroPrefillQueryEngine.from_args("no index", backend)


def test_in_a_tool_the_response_is_the_raw_output(engine):
    output = QueryEngineTool.from_defaults(engine, name="pages").call(QUERY)
    assert output.content == output.raw_output.response
    assert get_audit(output).outcome == "pruned"


def test_in_a_condensing_chat_engine_with_our_llm(engine, backend):
    chat = CondenseQuestionChatEngine.from_defaults(engine, llm=engine._response_synthesizer._llm)
    assert get_audit(chat.chat(QUERY))
    assert get_audit(asyncio.run(chat.achat("And what about the audit?")))
    assert len(chat.chat_history) == 4


def test_f09_threads_and_tasks_answer_as_serial_runs_do(pp, index):
    engine = index.as_query_engine(
        node_postprocessors=[pp], response_synthesizer=pp.synthesizer(max_new_tokens=5), **TOP
    )
    questions = [f"Which word is it, number {i}?" for i in range(6)]
    serial = [engine.query(question) for question in questions]

    async def gathered():
        return await asyncio.gather(*[engine.aquery(question) for question in questions])

    with ThreadPoolExecutor(6) as pool:
        threads = list(pool.map(engine.query, questions))
    for others in (threads, asyncio.run(gathered())):
        assert [each.response for each in others] == [each.response for each in serial]
        assert [ids(each.source_nodes) for each in others] == [ids(each.source_nodes) for each in serial]


def test_f10_the_event_loop_stays_free_during_a_prefill(pp, index, backend):
    backend.model.model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(0.4))
    engine = index.as_query_engine(
        node_postprocessors=[pp], response_synthesizer=pp.synthesizer(max_new_tokens=2), **TOP
    )

    async def heartbeat():
        gaps, running = [], asyncio.create_task(engine.aquery(QUERY))
        while not running.done():
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)
        await running
        return gaps

    asyncio.run(engine.aquery(QUERY))  # first use imports and measures
    gaps = asyncio.run(heartbeat())
    assert len(gaps) > 20
    assert max(gaps) < 0.3


@pytest.mark.slow
def test_f11_a_hundred_queries_leave_nothing_behind(pp, index):
    import gc

    import torch

    engine = index.as_query_engine(
        node_postprocessors=[pp], response_synthesizer=pp.synthesizer(max_new_tokens=1), **TOP
    )
    counts = []
    for at in range(100):
        engine.query(QUERY)
        if at in (9, 99):
            gc.collect()
            tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            counts.append((tensors, threading.active_count()))
    assert counts[1][0] <= counts[0][0] + 5
    assert counts[1][1] <= counts[0][1]


def test_f29_weights_of_a_loaded_llm_are_used_again(index):
    huggingface = pytest.importorskip("llama_index.llms.huggingface")
    from tiny import model, tokenizer

    weights = model()
    llm = huggingface.HuggingFaceLLM(
        model=weights,
        tokenizer=tokenizer(),
        tokenizer_outputs_to_remove=["token_type_ids"],
        context_window=2048,
        max_new_tokens=4,
    )
    backend = backend_from_llm(llm)
    try:
        assert backend.model is weights
        pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED)
        response = index.as_query_engine(llm=llm, node_postprocessors=[pp], **TOP).query(QUERY)
        assert get_audit(response).outcome == "pruned"
        with pytest.raises(ModelSourceError, match="MockLLM"):
            backend_from_llm(MockLLM())
    finally:
        backend.close()


def test_our_llm_completes_chats_and_streams_without_blocking_the_loop(backend):
    from llama_index.core.llms import ChatMessage

    llm = EntroPrefillSynthesizer(backend)._llm
    assert isinstance(llm, EntroPrefillLLM)
    whole = llm.complete("Hello?", max_new_tokens=5)
    assert whole.raw["usage"]["completion_tokens"] == 5
    assert list(llm.stream_complete("Hello?", max_new_tokens=5))[-1].text == whole.text

    async def asynchronous():
        pieces = [each async for each in await llm.astream_complete("Hello?", max_new_tokens=5)]
        chat = await llm.achat([ChatMessage(role="user", content="Hello?")], max_new_tokens=3)
        chats = [
            each
            async for each in await llm.astream_chat([ChatMessage(role="user", content="Hello?")], max_new_tokens=3)
        ]
        return (await llm.acomplete("Hello?", max_new_tokens=5)).text, pieces[-1].text, chat, chats[-1]

    one, two, chat, last = asyncio.run(asynchronous())
    assert one == two == whole.text
    assert chat.message.content == last.message.content


def test_a_persisted_index_is_reopened_and_answers_the_same(backend, documents, tmp_path):
    embed = MockEmbedding(embed_dim=8)
    made = VectorStoreIndex(documents, embed_model=embed)
    made.storage_context.persist(str(tmp_path))
    reopened = load_index_from_storage(StorageContext.from_defaults(persist_dir=str(tmp_path)), embed_model=embed)
    answers = [
        EntroPrefillQueryEngine.from_args(each, backend, config=SEEDED, generation={"max_new_tokens": 5}, **TOP).query(
            QUERY
        )
        for each in (made, reopened)
    ]
    assert answers[0].response == answers[1].response
    assert ids(answers[0].source_nodes) == ids(answers[1].source_nodes)
    assert answers[0].source_nodes[0].metadata["file_name"].endswith(".md")


def test_chroma_on_disk_is_reopened_and_answers_the_same(backend, documents, tmp_path):
    chromadb = pytest.importorskip("chromadb")
    stores = pytest.importorskip("llama_index.vector_stores.chroma")
    embed = MockEmbedding(embed_dim=8)

    def opened():
        client = chromadb.PersistentClient(str(tmp_path), chromadb.Settings(anonymized_telemetry=False))
        return stores.ChromaVectorStore(client.get_or_create_collection("pages", embedding_function=None))

    store = opened()
    made = VectorStoreIndex(
        documents[:12], storage_context=StorageContext.from_defaults(vector_store=store), embed_model=embed
    )
    reopened = VectorStoreIndex.from_vector_store(opened(), embed_model=embed)
    answers = [
        EntroPrefillQueryEngine.from_args(each, backend, config=SEEDED, generation={"max_new_tokens": 5}, **TOP).query(
            QUERY
        )
        for each in (made, reopened)
    ]
    assert answers[0].response == answers[1].response
    assert answers[0].audit.outcome == "pruned"


def test_a_list_index_passes_all_its_nodes(backend, documents):
    response = EntroPrefillQueryEngine.from_args(
        SummaryIndex(documents[:8]), backend, config=SEEDED, generation={"max_new_tokens": 2}
    ).query(QUERY)
    assert len(response.audit.prompt.chunks) == 8
