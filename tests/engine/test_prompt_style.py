"""Templates are checked when the style is made."""

import pytest

from entroprefill_rag.engine.prompt_style import Field, PromptStyle, template_parts
from entroprefill_rag.errors import TemplateError
from entroprefill_rag.request import Chunk, RagRequest


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{query}\n{context}", "all documents must precede the query.*move {query} behind {context}"),
        ("{query} {context} {query}", "all documents must precede the query"),
        ("{context}", r"no \{query\}"),
        ("only {query}", r"no \{context\}"),
        ("", r"no \{context\}"),
        ("{context}{context}{query}", "more than once"),
        ("{context}{history}{query}", r"move \{history\} in front"),
        ("{context}{query}{quarry}", "quarry.*knows only"),
        ("{context}{query}{}", "knows only"),
        ("{context}{query}{0}", "knows only"),
        ("{context.__class__}{query}", "knows only"),
        ("{context!r}{query}", "knows only"),
        ("{context:>10}{query}", "knows only"),
        ("{context}{query}{", "cannot be read.*twice"),
        ("{context}{query}}", "cannot be read.*twice"),
    ],
)
def test_a_template_that_cannot_work_is_refused_with_the_way_out(template, says):
    with pytest.raises(TemplateError, match=says):
        PromptStyle(template=template)


def test_braces_that_are_text_are_written_twice():
    assert template_parts('{{"docs": "{context}"}} {query}') == ['{"docs": "', Field("context"), '"} ', Field("query")]


@pytest.mark.parametrize(
    "template",
    [
        "文档：\n{context}\n\n问题：{query}\n回答：",
        "{context}\n\nسؤال: {query}",
        "{instruction}{context}{query}{query}",
    ],
)
def test_templates_in_any_language_and_a_repeated_query_are_fine(template):
    assert PromptStyle(template=template).template == template


def test_headers_show_number_title_and_id_and_never_read_braces_of_a_title():
    style = PromptStyle(chunk_header="[{number}|{id}] {title}: ", untitled_header="[{number}] ")
    assert style.header(Chunk(id="a", text="x", title="{number} {query}"), 3) == "[3|a] {number} {query}: "
    assert style.header(Chunk(id="a", text="x"), 3) == "[3] "


def test_a_header_with_an_unknown_placeholder_is_refused():
    with pytest.raises(TemplateError, match="chunk header"):
        PromptStyle(chunk_header="{metadata}")


def test_blank_text_without_a_title_has_no_header():
    style = PromptStyle()
    assert style.header(Chunk(id="a", text=" \n"), 1) == ""
    assert style.header(Chunk(id="a", text="", title="T"), 1) == "Document [1]: T\n"


def test_history_as_text_names_the_speakers():
    request = RagRequest(query="q", history=[("user", "hi"), ("assistant", "ho")])
    assert PromptStyle(speakers=("Frage", "Antwort")).history_text(request) == "Frage: hi\nAntwort: ho\n\n"
    assert PromptStyle().history_text(RagRequest(query="q")) == ""


@pytest.mark.parametrize("key", ["tokenize", "add_generation_prompt", "documents"])
def test_what_the_layout_decides_cannot_be_handed_to_the_chat_template(key):
    with pytest.raises(TemplateError, match=key):
        PromptStyle(chat_template_kwargs={key: True})
