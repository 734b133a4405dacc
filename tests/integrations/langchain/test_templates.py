"""LangChain prompts: documents before the question, in any language, or refused."""

import pytest
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from lc_cases import QUERY, SEEDED

from entroprefill_rag.engine.prompt_style import PromptStyle
from entroprefill_rag.errors import TemplateError
from entroprefill_rag.integrations.langchain import EntroPrefillCompressor, EntroPrefillRunnable
from entroprefill_rag.integrations.langchain.templates import as_style

RAG_PROMPT = "You are an assistant for question-answering tasks.\nQuestion: {question} \nContext: {context} \nAnswer:"


@pytest.mark.parametrize("name", ["input", "question", "query"])
def test_f18_text_with_the_documents_first_is_taken(name):
    style = as_style(f"Dokumente {{{{klar}}}}:\n{{context}}\n\nFrage: {{{name}}}")
    assert style.template == "Dokumente {{klar}}:\n{context}\n\nFrage: {query}"


def test_f18_a_template_of_another_language_is_what_the_model_reads(backend, documents):
    prompt = PromptTemplate.from_template("文档：\n{context}\n\n问题：{question}\n答案：")
    ep = EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=2, prompt=prompt)
    output = ep.invoke({"question": QUERY, "context": documents})
    assert output["entroprefill"]["outcome"] == "pruned"
    style = PromptStyle(template="文档：\n{context}\n\n问题：{query}\n答案：")
    other = EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=2, prompt=style)
    found = other.invoke({"question": QUERY, "context": documents})
    assert found["entroprefill"]["prompt_hash"] == output["entroprefill"]["prompt_hash"]
    assert backend.style == PromptStyle()


def test_f18_a_chat_prompt_is_taken_apart():
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Be brief."),
            MessagesPlaceholder("chat_history", optional=True),
            ("human", "{context}\n\nAsked: {input}"),
        ]
    )
    style = as_style(prompt)
    assert (style.instruction, style.template) == ("Be brief.", "{context}\n\nAsked: {query}")


def test_f18_documents_in_the_system_message_go_into_the_last_turn():
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use this:\n{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    assert as_style(prompt).template == "Use this:\n{context}\n\n{query}"


def test_f18_partial_variables_and_other_template_languages_are_filled_in():
    partial = PromptTemplate.from_template("{tone} {{x}}\n{context}\n{input}").partial(tone="Kind {please}.")
    assert as_style(partial).template == "Kind {{please}}. {{x}}\n{context}\n{query}"
    mustache = PromptTemplate.from_template("{{context}}\n{{input}}", template_format="mustache")
    assert as_style(mustache).template == "{context}\n{query}"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (RAG_PROMPT, "all documents must precede the query"),
        (PromptTemplate.from_template(RAG_PROMPT), "all documents must precede the query"),
        (
            ChatPromptTemplate.from_messages([("system", "Asked: {input}"), ("human", "{context}")]),
            "all documents must precede the question",
        ),
        ("{input}", "no {context}"),
        ("{context}", "no {input}"),
        ("{context} {input} {context}", "more than once"),
        ("{context} {tone} {input}", r"variable {tone}"),
        ("{context} {input} {", "cannot be read"),
        (
            ChatPromptTemplate.from_messages([("human", "example"), ("ai", "shot"), ("human", "{context} {input}")]),
            "chat_history",
        ),
        (3, "got int"),
    ],
)
def test_f18_a_prompt_that_cannot_be_audited_is_refused_when_the_object_is_made(prompt, says):
    for made in (EntroPrefillRunnable, EntroPrefillCompressor):
        with pytest.raises(TemplateError, match=says) as caught:
            made(prompt=prompt)
        assert type(caught.value) is TemplateError
