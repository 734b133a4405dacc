"""ChatEntroPrefill: documents beside messages, and nothing of a chat model missing."""

import json

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from lc_cases import QUERY, SEEDED, Written, make_documents, same_but_times

from entroprefill_rag import Chunk, RagRequest
from entroprefill_rag.errors import ConfigError, RequestError
from entroprefill_rag.integrations.langchain import ChatEntroPrefill, get_audit
from entroprefill_rag.integrations.langchain.stopping import StopText, cut

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def total(chunks):
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def test_f23_documents_come_in_a_call_or_bound(chat, documents):
    called = chat.invoke(QUERY, documents=documents)
    bound = chat.bind(documents=documents).invoke(QUERY)
    assert called.content == bound.content
    for message in (called, bound):
        assert message.response_metadata["entroprefill"]["outcome"] == "pruned"
        assert message.response_metadata["model_name"] == "tiny"
        assert message.response_metadata["finish_reason"] == "length"


async def test_f23_every_way_of_calling_gives_the_same_message(chat, documents):
    expected = chat.invoke(QUERY, documents=documents)
    for message in (
        await chat.ainvoke(QUERY, documents=documents),
        total(chat.stream(QUERY, documents=documents)),
        total([chunk async for chunk in chat.astream(QUERY, documents=documents)]),
        chat.batch([QUERY], documents=documents)[0],
        (await chat.abatch([QUERY], documents=documents))[0],
    ):
        assert message.content == expected.content
        assert message.usage_metadata == expected.usage_metadata
        metadata = message.response_metadata
        assert metadata["finish_reason"] == "length"
        assert metadata["model_name"] == "tiny"
        assert metadata["entroprefill"]["retained_ids"] == expected.response_metadata["entroprefill"]["retained_ids"]


def test_f23_the_record_is_on_the_first_chunk_and_merging_repeats_nothing(chat, documents):
    chunks = list(chat.stream(QUERY, documents=documents))
    assert ["entroprefill" in chunk.response_metadata for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0].content == ""
    assert chunks[-1].chunk_position == "last"
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    whole = total(chunks)
    assert whole.response_metadata["entroprefill"] == chunks[0].response_metadata["entroprefill"]
    json.dumps(whole.response_metadata)


def test_f23_a_streaming_handler_gets_each_token_once(chat, documents):
    written = Written()
    streaming = ChatEntroPrefill(backend=chat.source, pruning=SEEDED, max_tokens=8, temperature=0, streaming=True)
    message = streaming.invoke(QUERY, {"callbacks": [written]}, documents=documents)
    assert "".join(written.tokens) == message.content
    assert message.response_metadata["entroprefill"]["outcome"] == "pruned"
    assert not written.open


def test_f23_full_records_come_once(chat, documents):
    full = ChatEntroPrefill(backend=chat.source, pruning=SEEDED, max_tokens=4, temperature=0, include_record="full")
    message = full.invoke(QUERY, documents=documents)
    whole = total(full.stream(QUERY, documents=documents))
    assert get_audit(message).retained_ids == get_audit(whole).retained_ids
    assert same_but_times(get_audit(whole).prompt.model_dump()) == get_audit(message).prompt.model_dump()


def test_f23_without_documents_it_just_answers(chat, backend):
    message = chat.invoke([SystemMessage("Be brief."), HumanMessage("Hello")])
    summary = message.response_metadata["entroprefill"]
    assert message.content
    assert (summary["outcome"], summary["reason"]) == ("bypassed", "no_chunks")
    ids = backend.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    # Just the conversation: no word about documents.
    assert message.usage_metadata["input_tokens"] == len(ids)


def test_f23_no_documents_found_is_not_the_same_as_no_documents_given(chat):
    found_none = chat.invoke(QUERY, documents=[])
    assert found_none.usage_metadata["input_tokens"] > chat.invoke(QUERY).usage_metadata["input_tokens"]


def test_f23_messages_become_instruction_history_and_question(chat, documents, backend):
    messages = [
        SystemMessage("One."),
        HumanMessage("before?"),
        AIMessage("then."),
        HumanMessage([{"type": "text", "text": QUERY}]),
    ]
    request = RagRequest(
        instruction="One.",
        chunks=[Chunk(id=each.id, text=each.page_content) for each in documents],
        query=QUERY,
        history=[("user", "before?"), ("assistant", "then.")],
    )
    found = chat.invoke(messages, documents=documents).response_metadata["entroprefill"]["prompt_hash"]
    assert found == backend.layout(request, SEEDED).hash


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([AIMessage("I end")], "must be the user's question"),
        ([SystemMessage("alone")], "must be the user's question"),
        ([HumanMessage([{"type": "image_url", "image_url": "x"}])], "reads text only"),
        ([HumanMessage("q"), ToolMessage("r", tool_call_id="1"), HumanMessage("q")], "of type 'tool'"),
        ([AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]), HumanMessage("q")], "calls tools"),
        ([HumanMessage("  ")], "the question is blank"),
    ],
)
def test_f23_what_it_cannot_read_it_refuses(chat, messages, says):
    with pytest.raises(RequestError, match=says):
        chat.invoke(messages)


def test_f23_tools_and_another_model_are_refused(chat):
    with pytest.raises(ConfigError, match="tools is not supported"):
        chat.invoke(QUERY, tools=[{"name": "f"}])
    with pytest.raises(ConfigError, match="make another"):
        chat.invoke(QUERY, model="other")


def test_f23_a_stop_text_ends_the_answer_and_is_not_shown(chat, documents):
    whole = chat.invoke(QUERY, documents=documents).content
    stop = next(each for each in whole[1:] if each.isascii() and each.isprintable())
    expected = whole[: whole.index(stop)]
    assert chat.invoke(QUERY, documents=documents, stop=[stop]).content == expected
    assert total(chat.stream(QUERY, documents=documents, stop=[stop])).content == expected
    assert chat.bind(stop=[stop]).invoke(QUERY, documents=documents).content == expected
    made = ChatEntroPrefill(backend=chat.source, pruning=SEEDED, max_tokens=8, temperature=0, stop=[stop])
    message = made.invoke(QUERY, documents=documents)
    assert message.content == expected
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata["output_tokens"] < 8
    assert made.invoke(QUERY, documents=documents, stop=[]).content == whole


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_texts_are_cut_however_the_text_comes(size):
    text, stops = "abcSTabSTOPxyz", ["STOP", "", "zzz"]
    stop = StopText(stops)
    pieces = [stop.push(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(pieces) + stop.rest() == "abcSTab"
    assert cut(text, stops) == ("abcSTab", True)
    held = StopText(stops)
    assert held.push("endST") + held.rest() == "endST"


def test_f23_temperature_samples_and_zero_does_not(backend, documents):
    import torch

    def answers(**more):
        chat = ChatEntroPrefill(backend=backend, pruning=SEEDED, max_tokens=12, **more)
        found = []
        with torch.random.fork_rng():
            for seed in range(3):
                torch.manual_seed(seed)
                found.append(chat.invoke(QUERY, documents=documents).content)
        return set(found)

    assert len(answers(temperature=0)) == 1
    assert len(answers(temperature=3.0)) > 1


def test_f23_a_timeout_cuts_the_answer_off(chat, documents):
    assert chat.invoke(QUERY, documents=documents, max_tokens=400, timeout=0.05).usage_metadata["output_tokens"] < 400


def test_f23_a_global_cache_replays_no_old_record(chat, documents):
    set_llm_cache(InMemoryCache())
    try:
        chat.invoke(QUERY, documents=documents)
        other = chat.invoke(QUERY, documents=make_documents(3))
    finally:
        set_llm_cache(None)
    assert "d4" not in other.response_metadata["entroprefill"]["retained_ids"]


def test_f12_traces_name_the_documents_and_do_not_hold_their_text(chat, documents):
    written = Written()
    chat.invoke(QUERY, {"callbacks": [written]}, documents=documents)
    assert written.chat_params[0]["documents"] == [each.id for each in documents]
    assert "word00" not in json.dumps(written.chat_params[0])


def test_pruning_can_be_changed_for_one_call(chat, documents):
    off = SEEDED.model_copy(update={"enabled": False})
    assert chat.invoke(QUERY, documents=documents, pruning=off).response_metadata["entroprefill"]["outcome"] == "off"
