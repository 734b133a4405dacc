"""How a prompt is written: the words around the documents, and where the documents and the query go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from entroprefill_rag.errors import TemplateError
from entroprefill_rag.request import Chunk, RagRequest

DEFAULT_INSTRUCTION = (
    "Answer the question using only the documents given. If they do not contain the answer, say that you do not know."
)
CHAT_TEMPLATE = "{context}\n\nQuestion: {query}"
PLAIN_TEMPLATE = "{instruction}\n\n{history}{context}\n\nQuestion: {query}\nAnswer:"

_FIELDS = ("instruction", "history", "context", "query")
_HEADER_FIELDS = ("number", "title", "id")
_OURS = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "documents")


@dataclass(frozen=True)
class Field:
    """A placeholder of a template."""

    name: str


@dataclass(frozen=True)
class PromptStyle:
    """The words around the documents.

    Args:
        instruction: used where the request has none.
        template: text with ``{context}`` before ``{query}``, in any language; optional ``{instruction}`` and
            ``{history}``. With a chat model it is the content of the last user turn, and an instruction or history
            without a placeholder goes into turns of its own. Without a chat template it is the whole prompt, and
            special tokens written in it count as such. Braces are doubled, as for ``str.format``. None: a default.
        chunk_header: goes before the text of each chunk and away with it; ``{number}``, ``{title}``, ``{id}``.
        untitled_header: the same for chunks without a title.
        separator: between chunks; always kept.
        speakers: names of user and assistant where history is written as plain text.
        chat: use the tokenizer's chat template; None uses it if there is one.
        chat_template_kwargs: handed to the chat template, for example ``{"enable_thinking": False}``.

    Raises:
        TemplateError: a placeholder is missing, unknown or repeated, or the query comes before the documents.
    """

    instruction: str = DEFAULT_INSTRUCTION
    template: str | None = None
    chunk_header: str = "Document [{number}]: {title}\n"
    untitled_header: str = "Document [{number}]\n"
    separator: str = "\n\n"
    speakers: tuple[str, str] = ("User", "Assistant")
    chat: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template is not None:
            check_order(parse(self.template, _FIELDS, "the prompt template"))
        for header in (self.chunk_header, self.untitled_header):
            parse(header, _HEADER_FIELDS, "the chunk header")
        taken = sorted(set(_OURS) & set(self.chat_template_kwargs))
        if taken:
            raise TemplateError(
                f"chat_template_kwargs may not set {taken}: the layout decides these (chunks are the documents); "
                "leave them out"
            )

    def header(self, chunk: Chunk, number: int) -> str:
        """The header of a chunk; a chunk of blank text without a title has none, as there is nothing to announce."""
        if not chunk.text.strip() and not chunk.title:
            return ""
        values = {"number": str(number), "title": chunk.title, "id": chunk.id}
        parts = parse(self.chunk_header if chunk.title else self.untitled_header, _HEADER_FIELDS, "the chunk header")
        return "".join(values[part.name] if isinstance(part, Field) else part for part in parts)

    def history_text(self, request: RagRequest) -> str:
        """History as plain text, a line per turn and an empty line after it."""
        names = dict(zip(("user", "assistant"), self.speakers, strict=True))
        lines = [f"{names[turn.role]}: {turn.content}\n" for turn in request.history]
        return "".join([*lines, "\n"]) if lines else ""


def template_parts(template: str) -> list[str | Field]:
    """A checked prompt template as literal text and placeholders."""
    return parse(template, _FIELDS, "the prompt template")


def parse(template: str, known: tuple[str, ...], what: str) -> list[str | Field]:
    """Cut a template at its placeholders.

    Raises:
        TemplateError: unbalanced braces, an unknown placeholder, or one with a format or conversion.
    """
    parts: list[str | Field] = []
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise TemplateError(
            f"{what} {_shown(template)} cannot be read: {error}; write braces that are text twice ('{{{{' and '}}}}')"
        ) from error
    for literal, name, form, conversion in pieces:
        if literal and parts and isinstance(parts[-1], str):
            parts[-1] += literal
        elif literal:
            parts.append(literal)
        if name is None:
            continue
        if name not in known or form or conversion:
            allowed = ", ".join(f"{{{each}}}" for each in known)
            raise TemplateError(
                f"{what} has the placeholder {{{name}}}, but knows only {allowed}, without formats; write braces that "
                "are text twice"
            )
        parts.append(Field(name))
    return parts


def check_order(parts: list[str | Field]) -> None:
    """Raise TemplateError unless all documents come once and before the query, and history before the documents."""
    names = [part.name for part in parts if isinstance(part, Field)]
    for name in ("context", "query"):
        if name not in names:
            raise TemplateError(
                f"the prompt template has no {{{name}}}; it needs {{context}}, where the documents go, and after it "
                "{query}"
            )
    if names.count("context") > 1:
        raise TemplateError("the prompt template has {context} more than once; write the documents once")
    where = names.index("context")
    if "query" in names[:where]:
        raise TemplateError(
            "the prompt template puts {query} before {context}, but all documents must precede the query: what a chunk "
            "is worth is read from the query's attention back to it; move {query} behind {context}"
        )
    if "history" in names[where:]:
        raise TemplateError(
            "the prompt template puts {history} after {context}, but earlier turns come before the documents; move "
            "{history} in front of {context}"
        )


def _shown(template: str) -> str:
    return repr(template if len(template) <= 60 else template[:57] + "...")
