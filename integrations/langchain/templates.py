"""A LangChain prompt as a prompt of ours: cut where the documents and the question go."""

from __future__ import annotations

import re
from dataclasses import replace
from string import Formatter
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import BaseChatPromptTemplate, BasePromptTemplate, MessagesPlaceholder, PromptTemplate

from entroprefill_rag.engine.prompt_style import PromptStyle
from entroprefill_rag.errors import TemplateError

CONTEXT = ("context",)
QUERY = ("input", "question", "query")
HISTORY = ("chat_history", "history")

# Stand in for the texts when a prompt is filled in, so that templates of any language can be cut. Letters and digits
# only: no template language reads anything into them.
_MARKS = {"context": "entroprefill0context0d41c9e7b", "query": "entroprefill0query0d41c9e7b"}
_HISTORY_MARK = "entroprefill0history0d41c9e7b"


def as_style(prompt: str | BasePromptTemplate[Any] | PromptStyle | None) -> PromptStyle | None:
    """A prompt style from text, a prompt template of LangChain, or a style.

    Text and templates need ``{context}`` and after it ``{input}`` (or ``{question}``, ``{query}``). System messages
    before the documents become the instruction; a placeholder for ``chat_history`` says that history may come, which
    always goes before the documents. Messages from the documents on become the user's last turn.

    Raises:
        TemplateError: a variable is missing, unknown or repeated, or the question comes before the documents.
    """
    if prompt is None or isinstance(prompt, PromptStyle):
        return prompt
    if isinstance(prompt, str):
        template = PromptTemplate(template=prompt, input_variables=_variables(prompt))
        return as_style(template)
    if not isinstance(prompt, BasePromptTemplate):
        raise TemplateError(
            f"a prompt must be text, a LangChain prompt template or a PromptStyle, got {type(prompt).__name__}"
        )
    system, body = _read(prompt)
    return replace(PromptStyle(template=body), instruction=system) if system is not None else PromptStyle(template=body)


def _variables(text: str) -> list[str]:
    try:
        return sorted({name for _, name, _, _ in Formatter().parse(text) if name is not None})
    except ValueError as error:
        raise TemplateError(
            f"the prompt cannot be read: {error}; write braces that are text twice ('{{{{' and '}}}}')"
        ) from error


def _read(prompt: BasePromptTemplate[Any]) -> tuple[str | None, str]:
    """Text of the system messages before the documents, if there are any, and the rest with our placeholders."""
    messages = _filled(prompt)
    where = next((at for at, each in enumerate(messages) if _MARKS["context"] in _text(each)), None)
    if where is None:
        raise TemplateError("the prompt has no {context}; it needs {context}, where the documents go, and then {input}")
    head = messages[:where]
    odd = [each for each in head if not isinstance(each, SystemMessage) and _text(each) != _HISTORY_MARK]
    if odd:
        raise TemplateError(
            f"the prompt has a {odd[0].type} message before the one with {{context}}; only system messages and "
            "chat_history may stand there; pass examples as chat_history"
        )
    body = "\n\n".join(text for each in messages[where:] if (text := _text(each)) and text != _HISTORY_MARK)
    body = body.replace("{", "{{").replace("}", "}}")
    for name, mark in _MARKS.items():
        body = body.replace(mark, f"{{{name}}}")
    if _HISTORY_MARK in body:
        body = body.replace(_HISTORY_MARK, "{history}")
    system = [_text(each) for each in head if isinstance(each, SystemMessage)]
    if _HISTORY_MARK in "".join(system):
        raise TemplateError("the prompt puts chat_history into a system message; use MessagesPlaceholder instead")
    if any(_MARKS["query"] in text for text in system):
        raise TemplateError(
            "the prompt puts {input} before {context}, but all documents must precede the question: what a document is "
            "worth is read from the question's attention back to it; move {input} behind {context}"
        )
    return ("\n\n".join(system) if system else None), body


def _filled(prompt: BasePromptTemplate[Any]) -> list[BaseMessage]:
    """The prompt's messages with marks for our texts."""
    names = {*prompt.input_variables, *prompt.optional_variables}
    placed = _placeholders(prompt)
    values: dict[str, Any] = {}
    for name in names:
        if name in CONTEXT:
            values[name] = _MARKS["context"]
        elif name in QUERY:
            values[name] = _MARKS["query"]
        elif name in HISTORY:
            values[name] = [HumanMessage(_HISTORY_MARK)] if name in placed else _HISTORY_MARK
        elif name not in prompt.optional_variables:
            raise TemplateError(
                f"the prompt has the variable {{{name}}}, but only {{context}}, {{input}} (or {{question}}, {{query}}) "
                f"and {{chat_history}} have values; fill it in first: prompt.partial({name}=...)"
            )
    if not names.intersection(QUERY):
        raise TemplateError("the prompt has no {input}; it needs {context}, and after it {input}")
    try:
        filled = prompt.invoke(values).to_messages()
    except (KeyError, ValueError, TypeError) as error:
        raise TemplateError(f"the prompt cannot be filled in: {error}") from error
    return filled


def _placeholders(prompt: BasePromptTemplate[Any]) -> set[str]:
    messages = getattr(prompt, "messages", []) if isinstance(prompt, BaseChatPromptTemplate) else []
    return {each.variable_name for each in messages if isinstance(each, MessagesPlaceholder)}


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = [part if isinstance(part, str) else part.get("text") for part in message.content]
    if any(not isinstance(text, str) for text in texts):
        raise TemplateError("the prompt has a part that is not text; a text model's prompt is text only")
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(str(text) for text in texts))
