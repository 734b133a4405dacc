"""A prompt without its texts: what the template says, and where each of the user's texts goes.

A chat template is rendered once, with a unique mark in place of every text of the user's, and cut at the marks. So the
template may write special tokens and no text of the user's can, and a text can neither steer nor break the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from entroprefill_rag.engine.prompt_style import CHAT_TEMPLATE, PLAIN_TEMPLATE, Field, PromptStyle, template_parts
from entroprefill_rag.errors import TemplateError
from entroprefill_rag.request import RagRequest


@dataclass(frozen=True)
class Part:
    """A stretch of a prompt.

    Attributes:
        kind: ``"template"`` may hold special tokens, ``"text"`` may not, ``"context"`` is the place of the documents.
        text: what it says; empty for the context.
        source: whose text it is, for notes.
    """

    kind: Literal["template", "text", "context"]
    text: str = ""
    source: str = ""


def skeleton(request: RagRequest, style: PromptStyle, tokenizer: Any) -> tuple[list[Part], bool]:
    """The parts of the prompt of ``request``, the documents being one part.

    Returns:
        The parts in order, and whether they were written by the chat template (which writes its own first token).

    Raises:
        TemplateError: the chat template or the style cannot place what the request holds.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if style.chat and not has_template:
        raise TemplateError(
            f"chat=True, but {type(tokenizer).__name__} has no chat template; set tokenizer.chat_template, or leave "
            "`chat` at None for a plain prompt"
        )
    if has_template and style.chat is not False:
        return _chat(request, style, tokenizer), True
    return _plain(request, style), False


def _plain(request: RagRequest, style: PromptStyle) -> list[Part]:
    parts = template_parts(style.template or PLAIN_TEMPLATE)
    names = {part.name for part in parts if isinstance(part, Field)}
    for name in ("instruction", "history"):
        if name not in names and getattr(request, name):
            raise TemplateError(
                f"the request has {name} but the prompt template has no {{{name}}}, and a plain prompt has no other "
                f"place for it; add {{{name}}} before {{context}}"
            )
    filled = []
    for part in parts:
        filled.append(_fill(part, request, style) if isinstance(part, Field) else Part("template", part, "template"))
    return filled


def _fill(place: Field, request: RagRequest, style: PromptStyle) -> Part:
    if place.name == "context":
        return Part("context")
    texts = {
        "instruction": request.instruction or style.instruction,
        "history": style.history_text(request),
        "query": request.query,
    }
    return Part("text", texts[place.name], place.name)


def _chat(request: RagRequest, style: PromptStyle, tokenizer: Any) -> list[Part]:
    parts = template_parts(style.template or CHAT_TEMPLATE)
    names = {part.name for part in parts if isinstance(part, Field)}
    # Words of the style inside the user's turn are content like any other: only the chat template makes turns.
    last = [
        _fill(part, request, style) if isinstance(part, Field) else Part("text", part, "template") for part in parts
    ]
    instruction = "" if "instruction" in names else request.instruction or style.instruction
    turns = (
        [] if "history" in names else [(turn.role, Part("text", turn.content, "history")) for turn in request.history]
    )
    refusals: list[str] = []
    for in_parts in (False, True):
        for folded in (False, True) if instruction else (False,):
            system = Part("text", instruction, "instruction")
            head = [system, Part("text", "\n\n", "template")] if folded else []
            messages: list[tuple[str, list[Part]]] = [(role, [part]) for role, part in turns]
            if instruction and not folded:
                messages.insert(0, ("system", [system]))
            messages.append(("user", [*head, *last]))
            rendered, refusal = _render(messages, tokenizer, style, in_parts)
            if refusal is None:
                return rendered
            refusals.append(refusal)
    raise TemplateError(
        f"the chat template of {type(tokenizer).__name__} cannot hold this request: "
        f"{'; or else: '.join(dict.fromkeys(refusals))}. History should alternate between user and assistant and end "
        "with the assistant; PromptStyle(chat=False) writes a plain prompt instead"
    )


def _render(
    messages: Sequence[tuple[str, list[Part]]], tokenizer: Any, style: PromptStyle, in_parts: bool
) -> tuple[list[Part], str | None]:
    """Render with marks and cut at them; else say why that failed."""
    kwargs = dict(style.chat_template_kwargs)
    stem = _unused_stem(f"{tokenizer.chat_template!r}{kwargs!r}")
    marked: list[tuple[str, Part]] = []
    conversation: list[dict[str, Any]] = []
    for role, parts in messages:
        content = ""
        for part in parts:
            if part.kind == "context" or part.text:
                marked.append((f"{stem}n{len(marked):05d}x", part))
                content += marked[-1][0]
        conversation.append({"role": role, "content": [{"type": "text", "text": content}] if in_parts else content})
    try:
        text = tokenizer.apply_chat_template(conversation, **kwargs, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # A template is a program of somebody else's and may raise anything.
        return [], f"it refuses ({type(error).__name__}: {error})"
    for mark, part in marked:
        if text.count(mark) != 1:
            does = "leaves out" if mark not in text else "repeats"
            return [], f"it {does} or changes {_name(part)}"
    order = sorted(marked, key=lambda pair: text.index(pair[0]))
    refusal = _misplaced([part for _, part in order], [part for _, part in marked])
    return _cut(text, order), refusal


def _misplaced(order: list[Part], given: list[Part]) -> str | None:
    """Why the parts are in the wrong order; where an instruction stands before the documents is the template's call."""
    loose = [part for part in order if part.source != "instruction"]
    if loose != [part for part in given if part.source != "instruction"]:
        return "it changes the order of history, documents and query"
    return None


def _name(part: Part) -> str:
    return "the documents" if part.kind == "context" else f"the {part.source}"


def _cut(text: str, marked: list[tuple[str, Part]]) -> list[Part]:
    parts: list[Part] = []
    for mark, part in marked:
        before, _, text = text.partition(mark)
        parts += [Part("template", before, "chat template"), part]
    return [part for part in (*parts, Part("template", text, "chat template")) if part.text or part.kind == "context"]


def _unused_stem(haystack: str) -> str:
    """Letters and digits only, so that no template trims or escapes it, and unlike anything the template says."""
    salt = 0
    while f"EntroPrefillMark{salt}n" in haystack:
        salt += 1
    return f"EntroPrefillMark{salt}"
