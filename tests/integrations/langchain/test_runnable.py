"""EntroPrefillRunnable: every way to call it, every way to compose it."""

import copy
import functools
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from lc_cases import QUERY, SEEDED, STRICT, Written, ids, make_documents, same_but_times
from tiny import model, tokenizer

from entroprefill_rag.errors import PromptOverflowError, RecordError, RequestError
from entroprefill_rag.integrations.langchain import EntroPrefillRunnable, get_audit

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def given(documents):
    return {"input": QUERY, "context": documents}


def total(pieces):
    whole = None
    for piece in pieces:
        whole = piece if whole is None else whole + piece
    return whole


def comparable(output):
    """Without what a stream's summary cannot know yet, as it comes before the first token."""
    brief = same_but_times(output["entroprefill"])
    return {**output, "entroprefill": {key: value for key, value in brief.items() if key not in ("tokens", "decode")}}


def test_f20_invoke_returns_answer_retained_documents_and_summary(ep, given):
    output = ep.invoke(given)
    assert list(output) == [
        "input",
        "context",
        "retained_ids",
        "dropped",
        "entroprefill",
        "answer",
        "usage_metadata",
    ]
    assert output["input"] == QUERY
    assert output["answer"]
    assert output["entroprefill"]["outcome"] == "pruned"
    assert output["dropped"]
    kept, gone = output["retained_ids"], [each["id"] for each in output["dropped"]]
    assert sorted(kept + gone) == ids(given["context"])
    assert [given["context"][each["position"]].id for each in output["dropped"]] == gone
    assert ids(output["context"]) == kept == [each for each in ids(given["context"]) if each in kept]


async def test_f20_every_way_of_calling_gives_the_same_output(ep, given):
    ep.invoke(given)  # the first to look at this seed's draws; records of later ones say that they are not
    expected = comparable(ep.invoke(given))

    async def once():
        yield given

    for output in (
        await ep.ainvoke(given),
        total(ep.stream(given)),
        total([piece async for piece in ep.astream(given)]),
        total(ep.transform(iter([given]))),
        total([piece async for piece in ep.atransform(once())]),
        ep.batch([given])[0],
        (await ep.abatch([given]))[0],
    ):
        assert comparable(output) == expected


def test_f20_the_record_and_the_context_come_before_the_first_token(ep, given):
    first, *rest = ep.stream(given)
    assert set(first) == {"input", "context", "retained_ids", "dropped", "entroprefill"}
    assert all(set(piece) == {"answer"} for piece in rest[:-1])
    assert len(rest) > 3
    assert set(rest[-1]) == {"usage_metadata"}


def test_f20_an_input_that_comes_in_pieces_is_put_together(ep, given):
    question = [{"input": QUERY[:5]}, {"input": QUERY[5:]}, {"context": given["context"]}]
    assert total(ep.transform(iter(question)))["answer"] == ep.invoke(given)["answer"]


def test_f20_composes_after_assign_and_a_dict_literal(ep, retriever, given):
    expected = ep.invoke(given)["answer"]
    literal = {"context": retriever, "input": RunnablePassthrough()} | ep
    assign = RunnablePassthrough.assign(context=itemgetter("input") | retriever) | ep
    assert literal.invoke(QUERY)["answer"] == assign.invoke({"input": QUERY})["answer"] == expected
    assert total(literal.stream(QUERY))["answer"] == total(assign.stream({"input": QUERY}))["answer"] == expected
    assert (literal.pick("answer") | StrOutputParser()).invoke(QUERY) == expected


def test_f20_a_picked_answer_streams_token_by_token(ep, retriever):
    chain = {"context": retriever, "input": RunnablePassthrough()} | ep.pick("answer")
    assert len(list(chain.stream(QUERY))) > 3
    assert all(isinstance(piece, str) for piece in chain.stream(QUERY))


def test_f20_fits_create_retrieval_chain(ep, retriever, given):
    chains = pytest.importorskip("langchain_classic.chains")
    output = chains.create_retrieval_chain(retriever, ep.pick("answer")).invoke({"input": QUERY})
    assert output["answer"] == ep.invoke(given)["answer"]


def test_f20_config_reaches_the_chat_model_and_every_run_ends(ep, given):
    written = Written()
    ep.with_config(callbacks=[written], tags=["mine"]).invoke(given)
    assert not written.open
    assert len(written.ended) == 2  # the chain and the chat model in it
    broken = {"input": QUERY, "context": ["no document"]}
    with pytest.raises(RequestError):
        list(ep.stream(broken, {"callbacks": [written]}))
    assert not written.open


def test_f20_retries_what_failed_and_falls_back(ep, given):
    calls = []

    def fails_once(value):
        calls.append(value)
        if len(calls) == 1:
            raise ConnectionError("once")
        return value

    chain = (RunnableLambda(fails_once) | ep).with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    assert chain.invoke(given)["answer"] == ep.invoke(given)["answer"]
    fallback = ep.with_fallbacks([RunnableLambda(lambda value: {"answer": "plain"})])
    assert fallback.invoke({"input": " ", "context": []}) == {"answer": "plain"}


async def test_f20_events_show_a_chain_with_a_chat_model_in_it(ep, given):
    events = [event async for event in ep.astream_events(given, version="v2")]
    names = [event["event"] for event in events]
    assert names[:2] == ["on_chain_start", "on_chat_model_start"]
    assert names[-2:] == ["on_chat_model_end", "on_chain_end"]
    chunks = [event["data"]["chunk"] for event in events if event["event"] == "on_chain_stream"]
    assert "entroprefill" in chunks[0]
    assert next(event["name"] for event in events) == "EntroPrefillRunnable"


def test_f20_schemas_name_the_keys(ep):
    assert set(ep.get_input_jsonschema()["properties"]) >= {"input", "question", "context", "chat_history"}
    assert set(ep.get_output_schema().model_fields) >= {"answer", "context", "retained_ids", "dropped", "entroprefill"}
    assert ep.get_input_schema()(input="q", context=[Document(page_content="t")]).context[0].page_content == "t"


def test_f20_arguments_bound_to_a_call_come_before_those_of_the_object(ep, given):
    short = ep.bind(max_tokens=2).invoke(given)
    assert short["usage_metadata"]["output_tokens"] == 2
    assert ep.invoke(given)["usage_metadata"]["output_tokens"] == 8


def test_f09_a_batch_is_serial_unless_more_is_asked_for(ep, given, monkeypatch):
    at_work, most, lock = [0], [0], threading.Lock()
    plain = EntroPrefillRunnable._invoke

    @functools.wraps(plain)
    def counted(self, *args, **kwargs):
        with lock:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        try:
            return plain(self, *args, **kwargs)
        finally:
            with lock:
                at_work[0] -= 1

    monkeypatch.setattr(EntroPrefillRunnable, "_invoke", counted)
    serial = ep.batch([given] * 3)
    assert most[0] == 1
    several = ep.batch([given] * 6, {"max_concurrency": 3})
    assert 1 < most[0] <= 3
    assert {output["answer"] for output in serial + several} == {serial[0]["answer"]}


async def test_f09_a_failing_input_fails_alone_if_asked(ep, given):
    broken = {"input": None, "context": []}
    for outputs in (
        ep.batch([given, broken, given], return_exceptions=True),
        await ep.abatch([given, broken, given], return_exceptions=True),
    ):
        assert isinstance(outputs[1], RequestError)
        assert outputs[0]["answer"] == outputs[2]["answer"]
    with pytest.raises(RequestError):
        ep.batch([broken, given])
    with pytest.raises(RequestError):
        await ep.abatch([broken, given])
    assert ep.batch([]) == await ep.abatch([]) == []
    assert sorted(position for position, _ in ep.batch_as_completed([given] * 2)) == [0, 1]
    assert sorted([position async for position, _ in ep.abatch_as_completed([given] * 2)]) == [0, 1]


def test_f09_parallel_calls_equal_serial_ones(ep):
    inputs = [{"input": f"{QUERY} {i}", "context": make_documents(4 + i)} for i in range(4)]
    serial = [ep.invoke(each)["answer"] for each in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert [output["answer"] for output in pool.map(ep.invoke, inputs)] == serial


def test_f09_interleaved_streams_do_not_wait_for_each_other(ep, given):
    one, two = ep.stream(given), ep.stream({**given, "input": "Another?"})
    taken = [next(each) for each in (one, two, one, two, two, one)]
    assert {QUERY, "Another?"} == {piece["input"] for piece in taken if "input" in piece}
    assert "".join(piece.get("answer", "") for piece in [taken[2], taken[5], *one]) == ep.invoke(given)["answer"]
    two.close()


async def test_f11_an_abandoned_stream_frees_its_cache(ep, given):
    from transformers import DynamicCache

    gc.collect()
    before = sum(isinstance(each, DynamicCache) for each in gc.get_objects())
    for _ in range(3):
        for piece in ep.stream(given):
            if "answer" in piece:
                break
        stream = ep.astream(given)
        async for piece in stream:
            if "answer" in piece:
                break
        await stream.aclose()
    # The next call gets its turn, so nothing is held.
    assert (await ep.ainvoke(given))["answer"]
    gc.collect()
    assert sum(isinstance(each, DynamicCache) for each in gc.get_objects()) <= before


def test_f11_a_hundred_calls_leak_no_tensor_and_no_thread(ep, given):
    def counts():
        gc.collect()
        return sum(torch.is_tensor(each) for each in gc.get_objects()), threading.active_count()

    short = ep.bind(max_tokens=1)
    kept = [short.invoke(given)]
    before = counts()
    kept += [short.invoke(given) for _ in range(50)]
    kept += [total(short.stream(given)) for _ in range(50)]
    after = counts()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 1
    assert len(kept) == 101


def test_f03_inputs_are_not_touched(ep, given):
    before = copy.deepcopy(given)
    output = ep.invoke(given)
    output["context"][0].metadata["mine"] = 1
    list(ep.stream(given))
    assert given == before


def test_f21_id_metadata_and_type_of_documents_stay(ep):
    class Page(Document):
        number: int = 0

    documents = [
        Page(id=f"p{i}", page_content=f"text {i} " * 4, metadata={"source": f"f{i}", "deep": {"a": i}}, number=i)
        for i in range(5)
    ]
    for document in ep.invoke({"input": QUERY, "context": documents})["context"]:
        assert isinstance(document, Page)
        assert document in documents
        assert document not in [each for each in documents if each.number != document.number]


def test_f21_missing_ids_get_stand_ins_that_are_the_same_every_time_and_reported(ep):
    documents = [Document(page_content=f"text {i} " * 4) for i in range(4)]
    one, two = (ep.invoke({"input": QUERY, "context": documents}) for _ in range(2))
    assert one["retained_ids"] == two["retained_ids"]
    assert [each["why"] for each in one["entroprefill"]["stand_ins"]] == ["missing"] * 4
    assert all(document.id is None for document in one["context"])
    named = ep.invoke({"input": QUERY, "context": make_documents()})
    assert named["entroprefill"]["stand_ins"] == []


def test_f07_equal_texts_and_equal_ids_do_not_collide(ep):
    same = [Document(page_content="the same text " * 3) for _ in range(3)]
    twice = [Document(id="x", page_content=f"text {i} " * 4) for i in range(3)]
    output = ep.invoke({"input": QUERY, "context": [*same, *twice, Document(id="x#2", page_content="own " * 8)]})
    everything = output["retained_ids"] + [each["id"] for each in output["dropped"]]
    assert len(everything) == len(set(everything)) == 7
    assert "x#2" in everything
    assert [each["why"] for each in output["entroprefill"]["stand_ins"]].count("duplicate") == 2


@pytest.mark.parametrize("count", [0, 1, 2])
def test_f08_too_few_documents_are_answered_in_full_with_the_reason(ep, count):
    output = ep.invoke({"input": QUERY, "context": make_documents(count)})
    assert output["answer"]
    assert len(output["context"]) == count
    assert output["entroprefill"]["outcome"] == "bypassed"
    assert output["entroprefill"]["reason"] != ""
    assert output["dropped"] == []


def test_f08_a_bypass_keeps_all_documents(backend, given):
    output = EntroPrefillRunnable(backend=backend, pruning=STRICT, max_tokens=2).invoke(given)
    assert output["entroprefill"]["outcome"] == "bypassed"
    assert output["context"] == given["context"]


def test_f07_an_empty_document_is_kept(ep, documents):
    documents[2] = Document(id="empty", page_content="")
    output = ep.invoke({"input": QUERY, "context": documents})
    assert "empty" in output["retained_ids"]
    assert "empty" in output["entroprefill"]["protected_ids"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"input": None, "context": []}, "the question is None"),
        ({"context": []}, "the question is None"),
        ({"input": "  ", "context": []}, "the question is blank"),
        ({"input": ["a"], "context": []}, "the question is list"),
        ({"input": QUERY}, "no 'context'"),
        ({"input": QUERY, "context": "text"}, "must be a list"),
        ({"input": QUERY, "context": Document(page_content="t")}, "must be a list"),
        ({"input": QUERY, "context": ["text"]}, "item 0 is a str"),
        ({"input": QUERY, "context": [], "chat_history": [("wizard", "hi")]}, "chat_history cannot be read"),
        ({"input": QUERY, "context": [], "instruction": 3}, "pass text"),
        (QUERY, "the input is a str"),
    ],
)
def test_f07_what_cannot_be_asked_is_refused_in_words(ep, given, says):
    with pytest.raises(RequestError, match=says):
        ep.invoke(given)


def test_f18_history_and_instruction_are_in_the_prompt_before_the_documents(backend, given):
    seen = []
    plain = backend.layout
    config = SEEDED.model_copy(update={"include_text": True})
    ep = EntroPrefillRunnable(backend=backend, pruning=config, max_tokens=2, include_record="full")

    def hash_of(**more):
        return ep.invoke({**given, **more})["entroprefill"]["prompt_hash"]

    from entroprefill_rag import Chunk, RagRequest

    chunks = [Chunk(id=each.id, text=each.page_content) for each in given["context"]]
    turns = [("user", "before?"), ("assistant", "then.")]
    expected = plain(RagRequest(instruction="Be brief.", chunks=chunks, query=QUERY, history=turns), config)
    for history in (
        [("human", "before?"), ("ai", "then.")],
        turns,
        [HumanMessage("before?"), AIMessage("then.")],
        [{"role": "user", "content": "before?"}, {"role": "assistant", "content": "then."}],
    ):
        seen.append(hash_of(instruction="Be brief.", chat_history=history))
    assert set(seen) == {expected.hash}
    assert hash_of() == plain(RagRequest(chunks=chunks, query=QUERY), config).hash
    assert hash_of(question=QUERY, input=None) == hash_of()


def test_f06_metadata_is_not_shown_to_the_model_unless_asked(backend, given):
    def rendered(**more):
        ep = EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=1, **more)
        return ep.invoke(given)["entroprefill"]["prompt_hash"]

    shown = rendered(title_key="page")
    assert rendered() != shown
    given["context"] = [each.model_copy(update={"metadata": {**each.metadata, "x": 1}}) for each in given["context"]]
    assert rendered(title_key="page") == shown


def test_f19_too_long_a_prompt_is_refused_or_its_last_documents_not_admitted(backend, ep):
    many = make_documents(30, words=20)
    with pytest.raises(PromptOverflowError, match="drop_last"):
        ep.invoke({"input": QUERY, "context": many})
    drop = SEEDED.model_copy(update={"overflow": "drop_last"})
    output = EntroPrefillRunnable(backend=backend, pruning=drop, max_tokens=2).invoke({"input": QUERY, "context": many})
    out = set(output["entroprefill"]["not_admitted_ids"])
    assert out
    assert not out & {each["id"] for each in output["dropped"]}
    assert not out & set(output["retained_ids"])
    assert not out & set(ids(output["context"]))
    usage = output["usage_metadata"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_f15_the_full_record_is_there_on_request_and_survives_json(backend, given):
    import json

    ep = EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=3, include_record="full")
    output = ep.invoke(given)
    record = get_audit(output)
    assert list(record.retained_ids) == output["retained_ids"]
    assert record.trial.dual is not None
    assert get_audit(total(ep.stream(given))).retained_ids == record.retained_ids
    stored = json.loads(json.dumps({**output, "context": None}))
    assert get_audit(stored) == record


def test_f15_a_summary_says_how_to_get_the_record(ep, given):
    output = ep.invoke(given)
    assert "include_record='full'" in output["entroprefill"]["full_record"]
    with pytest.raises(RecordError, match="include_record='full'"):
        get_audit(output)
    with pytest.raises(RecordError, match="holds no record"):
        get_audit({"answer": "x"})
    with pytest.raises(RecordError, match="no record in str"):
        get_audit("x")


def test_f05_the_summary_is_small_plain_json(ep, given):
    import json

    text = json.dumps(ep.invoke(given)["entroprefill"])
    assert len(text) < 6000


def test_f28_the_same_seed_gives_the_same_record(backend, given):
    ep = EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=2, include_record="full")
    one, two = (get_audit(ep.invoke(given)) for _ in range(2))
    assert one.audit == two.audit
    assert one.audit.seed == 7
    state = torch.random.get_rng_state()
    ep.invoke(given)
    assert torch.equal(state, torch.random.get_rng_state())


def test_f29_weights_are_taken_from_a_pipeline(given):
    from types import SimpleNamespace

    from entroprefill_rag.errors import ConfigError
    from entroprefill_rag.integrations.langchain import backend_from_pipeline

    weights, words = model(), tokenizer()
    # As HuggingFacePipeline holds it; with `llm` around it, as ChatHuggingFace does.
    pipe = SimpleNamespace(pipeline=SimpleNamespace(model=weights, tokenizer=words))
    for llm in (pipe, SimpleNamespace(llm=pipe), pipe.pipeline):
        with backend_from_pipeline(llm, name="mine") as backend:
            assert backend.model is weights
            assert EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=2).invoke(given)["answer"]
    with pytest.raises(ConfigError, match="holds no local model"):
        backend_from_pipeline(SimpleNamespace(client=None))


def test_f29_decoding_that_cannot_be_pruned_answers_in_full_with_the_reason(backend, given):
    ep = EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=2, model_kwargs={"num_beams": 2})
    output = ep.invoke(given)
    assert (output["entroprefill"]["outcome"], output["entroprefill"]["reason"]) == ("bypassed", "generation_mode")
    assert output["context"] == given["context"]


def test_f20_content_in_blocks_is_read_as_text(ep, given, monkeypatch):
    expected = ep.invoke(given)["answer"]
    monkeypatch.setenv("LC_OUTPUT_VERSION", "v1")
    blocks = EntroPrefillRunnable(backend=ep.source, pruning=SEEDED, max_tokens=8, temperature=0)
    assert blocks.invoke(given)["answer"] == expected
    assert total(blocks.stream(given))["answer"] == expected
