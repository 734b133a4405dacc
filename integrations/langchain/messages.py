"""A conversation as instruction, history and question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    convert_to_messages,
)

from entroprefill_rag.errors import RequestError
from entroprefill_rag.request import Turn


@dataclass(frozen=True)
class Conversation:
    """What a list of messages says.

    Attributes:
        instruction: all system messages, in order.
        history: the turns before the last question.
        query: the last message, which is the user's.
    """

    instruction: str
    history: tuple[Turn, ...]
    query: str


def read(messages: Sequence[BaseMessage]) -> Conversation:
    """Take a conversation apart.

    Raises:
        RequestError: it does not end with a question of the user's, or holds something other than text.
    """
    instruction: list[str] = []
    turns: list[Turn] = []
    for message in messages:
        role = _role(message)
        if role == "system":
            instruction.append(text_of(message))
        else:
            turns.append(Turn(role="assistant" if role == "assistant" else "user", content=text_of(message)))
    if not turns or turns[-1].role != "user":
        last = f"a {messages[-1].type} message" if messages else "nothing"
        raise RequestError(f"the conversation ends with {last}; its last message must be the user's question")
    return Conversation("\n\n".join(instruction), tuple(turns[:-1]), question(turns[-1].content))


def write(query: str, instruction: str, chat_history: Any) -> list[BaseMessage]:
    """The messages of one question.

    Args:
        query: the question.
        instruction: what the model is told to do; empty for the style's own.
        chat_history: messages, ``(role, content)`` pairs or ``{"role", "content"}`` mappings, oldest first; or None.

    Raises:
        RequestError: the history cannot be read.
    """
    try:
        history = convert_to_messages(chat_history or [])
    except (ValueError, NotImplementedError, TypeError) as error:
        raise RequestError(
            f"chat_history cannot be read: {error}; pass messages, or pairs like ('human', text) and ('ai', text)"
        ) from error
    first: list[BaseMessage] = [SystemMessage(instruction)] if instruction else []
    return [*first, *history, HumanMessage(query)]


def question(value: Any) -> str:
    """The question, if it is one.

    Raises:
        RequestError: it is not text, or blank.
    """
    if not isinstance(value, str) or not value.strip():
        seen = "blank" if isinstance(value, str) else f"{value!r:.60}" if value is None else type(value).__name__
        raise RequestError(f"the question is {seen}; pass text that asks something, under 'input' or 'question'")
    return value


def text_of(message: BaseMessage) -> str:
    """The text of a message.

    Raises:
        RequestError: it holds images or other parts that a text model cannot read.
    """
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"a {message.type} message holds a part of type {kind!r}; this model reads text only")
        texts.append(text)
    return "".join(texts)


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage) and not message.tool_calls:
        return "assistant"
    if isinstance(message, ChatMessage) and message.role in ("system", "user", "assistant"):
        return message.role
    what = "calls tools" if isinstance(message, AIMessage) else f"is of type {message.type!r}"
    raise RequestError(
        f"a message {what}, which this chat model cannot read; pass system, human and ai messages, and tool results as "
        "documents=[Document(...)]"
    )
