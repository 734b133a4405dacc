"""The synthesizer: every kind of response, with sources, record and summary."""

import asyncio
import gc
import json
import threading
import time

import pytest
from llama_cases import QUERY, SEEDED, STRICT, ids, make_nodes
from llama_index.core import ChatPromptTemplate, PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import RichPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.chat_prompts import CHAT_TEXT_QA_PROMPT
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.default_prompts import DEFAULT_REFINE_PROMPT, DEFAULT_TEXT_QA_PROMPT
from llama_index.core.schema import NodeWithScore, TextNode

from entroprefill_rag.errors import PromptOverflowError, TemplateError
from entroprefill_rag.integrations.llama_index import (
    AsyncEntroPrefillStreamingResponse,
    EntroPrefillResponse,
    EntroPrefillStreamingResponse,
    EntroPrefillSynthesizer,
    get_audit,
)

GENERATION = {"max_new_tokens": 6}


@pytest.fixture
def make(backend):
    return lambda **more: EntroPrefillSynthesizer(backend, **{"config": SEEDED, "generation": GENERATION, **more})


async def drained(response):
    return "".join([piece async for piece in response.response_gen])


def test_f14_the_four_kinds_of_response_agree(make, nodes):
    plain, streaming = make(), make(streaming=True)

    async def asynchronous():
        whole = await plain.asynthesize(QUERY, nodes)
        stream = await streaming.asynthesize(QUERY, nodes)
        return whole, stream, await drained(stream)

    whole = plain.synthesize(QUERY, nodes)
    stream = streaming.synthesize(QUERY, nodes)
    text = "".join(stream.response_gen)
    awhole, astream, atext = asyncio.run(asynchronous())
    assert isinstance(whole, EntroPrefillResponse)
    assert isinstance(awhole, EntroPrefillResponse)
    assert isinstance(stream, EntroPrefillStreamingResponse)
    assert isinstance(astream, AsyncEntroPrefillStreamingResponse)
    assert whole.response == text == awhole.response == atext
    assert text
    for response in (whole, stream, awhole, astream):
        assert tuple(ids(response.source_nodes)) == get_audit(response).retained_ids
        assert len(response.source_nodes) == 2
        assert response.metadata["entroprefill"]["tokens"]["generated"] == 6


def test_f15_sources_summary_and_audit_are_there_before_the_first_token(make, nodes):
    response = make(streaming=True).synthesize(QUERY, nodes)
    brief = response.metadata["entroprefill"]
    assert "generated" not in brief["tokens"]
    assert brief["retained_ids"] == ids(response.source_nodes)
    assert get_audit(response).outcome == "pruned"
    assert get_audit(response).trial.dual is None
    whole = response.get_response()
    assert whole.response
    assert brief["tokens"]["generated"] == 6
    assert get_audit(whole).trial.dual is not None


def test_f15_an_asynchronous_stream_has_them_before_its_first_token_too(make, nodes):
    async def before_and_after():
        response = await make(streaming=True).asynthesize(QUERY, nodes)
        brief = response.metadata["entroprefill"]
        assert "generated" not in brief["tokens"]
        assert brief["retained_ids"] == ids(response.source_nodes)
        assert get_audit(response).outcome == "pruned"
        whole = await response.get_response()
        assert get_audit(whole).outcome == "pruned"
        return brief["tokens"]["generated"]

    assert asyncio.run(before_and_after()) == 6


def test_f15_the_summary_is_a_small_plain_dict(make):
    response = make().synthesize(QUERY, make_nodes(12, words=3))
    brief = response.metadata["entroprefill"]
    assert type(brief) is dict
    assert len(json.dumps(brief)) < 5000
    assert all(isinstance(value, dict) for value in response.metadata.values())
    assert brief["outcome"] == "pruned"
    assert brief["seed"] == 7
    for audit in brief["audits"]:
        assert audit["worst"] <= audit["limit"]
    assert brief["caps"]["max_discarded"] <= brief["caps"]["cap"]
    assert set(brief["retained_ids"]).isdisjoint(brief["dropped_ids"])


def test_f14_empty_nodes_are_answered_as_asked_without_a_model(nodes):
    async def asynchronous(synthesizer):
        return await drained(await synthesizer.asynthesize(QUERY, []))

    for more, expected in (({}, "Empty Response"), ({"empty_response": "nothing"}, "nothing")):
        plain, streaming = (EntroPrefillSynthesizer(streaming=each, **more) for each in (False, True))
        assert plain.synthesize(QUERY, []).response == expected
        assert str(streaming.synthesize(QUERY, [])) == expected
        assert asyncio.run(asynchronous(streaming)) == expected
        assert plain.synthesize(QUERY, []).source_nodes == []
        assert get_audit(plain.synthesize(QUERY, [])) is None
        assert not plain._source.loaded


def test_f14_additional_sources_are_kept_after_the_retained(make, nodes):
    more = [NodeWithScore(node=TextNode(text="more", id_="more"))]
    response = make().synthesize(QUERY, nodes, additional_source_nodes=more)
    assert ids(response.source_nodes) == [*response.audit.retained_ids, "more"]


def test_f14_response_kwargs_fill_the_template_and_others_do_no_harm(make, nodes, backend):
    synthesizer = make(text_qa_template="In {tone} words.\n{context_str}\n{query_str}")
    hashes = {
        tone: synthesizer.synthesize(QUERY, nodes, tone=tone, other=1).audit.prompt.hash for tone in ("few", "many")
    }
    assert hashes["few"] != hashes["many"]


def test_f14_prompts_can_be_read_and_replaced(make, nodes):
    synthesizer = make()
    assert "{context_str}" in synthesizer.get_prompts()["text_qa_template"].get_template()
    before = synthesizer.synthesize(QUERY, nodes).audit.prompt.hash
    new = PromptTemplate("Unterlagen:\n{context_str}\nFrage: {query_str}\nAntwort:")
    synthesizer.update_prompts({"text_qa_template": new})
    assert synthesizer.get_prompts()["text_qa_template"] == new
    assert synthesizer.synthesize(QUERY, nodes).audit.prompt.hash != before
    with pytest.raises(TemplateError):
        synthesizer.update_prompts({"text_qa_template": PromptTemplate("{query_str} {context_str}")})


def test_texts_alone_are_answered_too(make):
    texts = [node.node.text for node in make_nodes()]

    async def asynchronous():
        gen = await make(streaming=True).aget_response(QUERY, texts)
        return await make().aget_response(QUERY, texts), "".join([piece async for piece in gen])

    whole = make().get_response(QUERY, texts)
    assert whole
    assert "".join(make(streaming=True).get_response(QUERY, texts)) == whole
    assert asyncio.run(asynchronous()) == (whole, whole)


def rendered(backend, template, chat=True):
    from entroprefill_rag.integrations._shared import BackendSource
    from entroprefill_rag.integrations.llama_index.prompts import as_template
    from entroprefill_rag.integrations.llama_index.task import Setup

    nodes = [NodeWithScore(node=TextNode(text=f"text {i}", id_=str(i))) for i in range(2)]
    task = Setup(BackendSource(backend), SEEDED, template=as_template(template)).task(nodes, "the {query}?")
    return task.backend.layout(task.request).rendered


@pytest.mark.parametrize(
    "template",
    [
        DEFAULT_TEXT_QA_PROMPT,
        CHAT_TEXT_QA_PROMPT,
        DEFAULT_TEXT_QA_PROMPT_SEL,
        RichPromptTemplate(
            "{% chat role='system' %}Say {% endchat %}"
            "{% chat role='user' %}{{ context_str }} - {{ query_str }}{% endchat %}"
        ),
        PromptTemplate("質問に答えてください {{json}}。\n{context_str}\n質問: {query_str}\n答え:"),
        PromptTemplate("{docs} | {q}", template_var_mappings={"context_str": "docs", "query_str": "q"}),
        ChatPromptTemplate(
            [
                ChatMessage(role="system", content="Context: {context_str}"),
                ChatMessage(role="user", content="{query_str}"),
            ]
        ),
    ],
    ids=["default", "chat", "selector", "rich", "japanese", "mapped", "context-in-system"],
)
def test_f18_templates_of_every_kind_put_documents_before_the_query(backend, template):
    text = rendered(backend, template)
    assert text.index("text 0") < text.index("text 1") < text.index("the {query}?")
    assert text.count("<|im_start|>assistant") == 1
    assert "entroprefill0" not in text


def test_f18_system_text_and_literal_braces_arrive_as_written(backend):
    text = rendered(backend, CHAT_TEXT_QA_PROMPT)
    assert text.startswith("<|im_start|>system\nYou are an expert Q&A system")
    assert "{json}" in rendered(backend, PromptTemplate("{{json}} {context_str} {query_str}"))


@pytest.mark.parametrize(
    "template",
    ["{query_str} {context_str}", "{context_str}", "{query_str}", "{context_str} {context_str} {query_str}"],
)
def test_f18_templates_that_cannot_be_pruned_are_refused_at_once(make, template):
    with pytest.raises(TemplateError, match="context_str"):
        make(text_qa_template=template)
    with pytest.raises(TemplateError):
        make(text_qa_template=DEFAULT_REFINE_PROMPT)


def test_f19_overflow_is_an_error_or_leaves_the_last_out_as_not_admitted(make):
    many = make_nodes(60, words=8)
    with pytest.raises(PromptOverflowError):
        make().synthesize(QUERY, many)
    response = make(config=STRICT.model_copy(update={"overflow": "drop_last"})).synthesize(QUERY, many)
    brief = response.metadata["entroprefill"]
    assert brief["not_admitted_ids"]
    assert not set(brief["not_admitted_ids"]) & set(brief["retained_ids"]) & set(brief["dropped_ids"])
    assert ids(response.source_nodes) == brief["retained_ids"]


def generating():
    return [thread for thread in threading.enumerate() if thread.name == "entroprefill-stream"]


@pytest.mark.parametrize("leave", ["break", "unread", "closed", "async"])
def test_f11_an_abandoned_stream_ends_its_generation(make, nodes, leave):
    endless = make(streaming=True, generation={"max_new_tokens": 1500})

    async def broken_off():
        response = await endless.asynthesize(QUERY, nodes)
        async for _ in response.response_gen:
            break
        await response.response_gen.aclose()

    if leave == "async":
        asyncio.run(broken_off())
    else:
        response = endless.synthesize(QUERY, nodes)
        assert generating()
        if leave == "break":
            next(response.response_gen)
        if leave == "closed":
            response.response_gen.close()
        else:
            del response
    gc.collect()
    for _ in range(50):
        if not generating():
            break
        time.sleep(0.1)
    assert not generating()
    assert make().synthesize(QUERY, nodes).response


def test_f09_two_interleaved_streams_do_not_wait_for_each_other(make, nodes):
    one, two = (make(streaming=True).synthesize(QUERY, nodes) for _ in range(2))
    texts = ["", ""]
    first, second = one.response_gen, two.response_gen
    done = False
    while not done:
        done = True
        for at, stream in enumerate((first, second)):
            piece = next(stream, None)
            if piece is not None:
                texts[at] += piece
                done = False
    assert texts[0] == texts[1] == make().synthesize(QUERY, nodes).response


def test_f14_selector_templates_take_the_chat_variant_for_a_chat_model(backend):
    chosen = SelectorPromptTemplate(
        default_template=PromptTemplate("plain {context_str} {query_str}"),
        conditionals=[(lambda llm: llm.metadata.is_chat_model, PromptTemplate("chat {context_str} {query_str}"))],
    )
    assert "chat " in rendered(backend, chosen)
