"""A LlamaIndex prompt template as a prompt of ours: cut where the documents and the query go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from llama_index.core.base.llms.types import MessageRole
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate

from entroprefill_rag.engine.prompt_style import PromptStyle
from entroprefill_rag.errors import TemplateError
from entroprefill_rag.request import Turn

DEFAULT_TEXT_QA = PromptTemplate("{context_str}\n\nQuestion: {query_str}")

# Stand in for the texts when a template is filled in, so that any kind of template can be cut. Letters and digits only:
# no template language reads anything into them.
_CONTEXT = "entroprefill0context0d41c9e7b"
_QUERY = "entroprefill0query0d41c9e7b"


@dataclass(frozen=True)
class Wording:
    """The words around the documents.

    Attributes:
        style: of the prompt.
        instruction: for the request; empty takes the style's.
        history: turns that the template puts before the documents.
    """

    style: PromptStyle
    instruction: str = ""
    history: tuple[Turn, ...] = ()


def wording(
    template: BasePromptTemplate | None,
    base: PromptStyle,
    *,
    instruction: str = "",
    chat: bool,
    variables: Mapping[str, Any] | None = None,
) -> Wording:
    """What a template says, as a style of ours.

    Args:
        template: any of LlamaIndex's, with ``{context_str}`` before ``{query_str}``; None takes ``base`` as it is.
        base: gives all that the template does not say.
        instruction: the caller's own, protected, before everything else.
        chat: whether the prompt will be written by a chat template.
        variables: values of the template's further variables.

    Raises:
        TemplateError: a variable is missing or repeated, or the query comes before the documents.
    """
    if template is None:
        return Wording(base, instruction)
    system, history, body = _read(template, chat, dict(variables or {}))
    told = "\n\n".join(text for text in (instruction, system) if text)
    if not chat:
        # A plain prompt has no turns: what stands before the documents is written where it stood.
        head = ("{instruction}\n\n" if told else "") + ("{history}" if history else "")
        body = head + body
    return Wording(replace(base, instruction="", template=body), told, history)


def _read(template: BasePromptTemplate, chat: bool, variables: dict[str, Any]) -> tuple[str, tuple[Turn, ...], str]:
    """System text, earlier turns, and the rest with our placeholders."""
    llm: Any = SimpleNamespace(metadata=SimpleNamespace(is_chat_model=chat, model_name="entroprefill"))
    variables |= {"context_str": _CONTEXT, "query_str": _QUERY}
    messages = [
        (message.role, str(message.content or "")) for message in template.format_messages(llm=llm, **variables)
    ]
    whole = "\n\n".join(text for _, text in messages)
    _check(whole)
    where = next(index for index, (_, text) in enumerate(messages) if _CONTEXT in text)
    system = "\n\n".join(text for role, text in messages[:where] if role == MessageRole.SYSTEM and text)
    history = tuple(
        Turn(role="assistant" if role == MessageRole.ASSISTANT else "user", content=text)
        for role, text in messages[:where]
        if role != MessageRole.SYSTEM
    )
    body = "\n\n".join(text for _, text in messages[where:] if text)
    body = body.replace("{", "{{").replace("}", "}}").replace(_CONTEXT, "{context}").replace(_QUERY, "{query}")
    return system, history, body


def _check(text: str) -> None:
    for mark, name in ((_CONTEXT, "{context_str}"), (_QUERY, "{query_str}")):
        if mark not in text:
            raise TemplateError(
                f"the text_qa_template does not show {name} as it is; it needs {{context_str}}, where the documents "
                "go, and after it {query_str}, neither changed by a function mapping"
            )
    if text.count(_CONTEXT) > 1:
        raise TemplateError("the text_qa_template has {context_str} more than once; write the documents once")
    if text.index(_QUERY) < text.index(_CONTEXT):
        raise TemplateError(
            "the text_qa_template puts {query_str} before {context_str}, but all documents must precede the query: "
            "what a node is worth is read from the query's attention back to it; move {query_str} behind {context_str}"
        )


def as_template(given: str | BasePromptTemplate | None) -> BasePromptTemplate | None:
    """A template from text or template, checked.

    Raises:
        TemplateError: it does not put all documents before the query.
    """
    template = PromptTemplate(given) if isinstance(given, str) else given
    if template is not None:
        check(template)
    return template


def check(template: BasePromptTemplate) -> None:
    """Raise TemplateError unless the template has all documents once, before the query."""
    for chat in (False, True):
        _read(template, chat, dict.fromkeys(template.template_vars, ""))
