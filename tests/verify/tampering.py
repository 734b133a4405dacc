"""Every way to change one place of a record: numbers, booleans, words, entries taken out or put in."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from entroprefill_rag import AuditConfig, AuditRecord, PruningConfig

Step = str | int


class _Schema(GenerateJsonSchema):
    def callable_schema(self, schema: object) -> dict[str, object]:
        return {}


def path_of(steps: tuple[Step, ...]) -> str:
    """``("trials", 0, "layer")`` as ``trials[0].layer``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".")


LONG = 16
"""Of longer lists (drawn rows, above all) the first entry, one in the middle and the last stand for all."""


def places(node: Any, steps: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """Every node below the root."""
    children: list[tuple[Step, Any]] = []
    if isinstance(node, dict):
        children = list(node.items())
    elif isinstance(node, list):
        count = len(node)
        shown = range(count) if count <= LONG else (0, count // 2, count - 1)
        children = [(i, node[i]) for i in shown]
    for name, child in children:
        yield (*steps, name), child
        yield from places(child, (*steps, name))


def alternatives(schema: dict[str, Any]) -> dict[str, set[str]]:
    """Words that stand for each other in the schema, by the name of their field."""
    found: dict[str, set[str]] = {}
    for part in (schema, *schema.get("$defs", {}).values()):
        for name, field in part.get("properties", {}).items():
            for variant in (field, *field.get("anyOf", ())):
                found.setdefault(name, set()).update(word for word in variant.get("enum", ()) if isinstance(word, str))
    return found


WORDS = {
    name: words
    for model in (AuditRecord, AuditConfig, PruningConfig)
    for name, words in alternatives(model.model_json_schema(schema_generator=_Schema)).items()
    if words
}


def changes(steps: tuple[Step, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """What may stand in the place of a value: for a number, a larger and a smaller one that matter."""
    if isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int):
        yield "one more", value + 1
        yield "one less", value - 1
    elif isinstance(value, float):
        yield "more", value * 1.5 + 0.1
        yield "less", value * 0.5 - 0.01
    elif isinstance(value, str):
        yield "another word", value + "x"
        if re.fullmatch("[0-9a-f]{64}", value):
            yield "another hash", value[::-1]
        if steps == ("created",):
            yield "another time", "2020-01-01T00:00:00+00:00"
        for word in sorted(WORDS.get(str(steps[-1]), set()) - {value}):
            yield f"now {word!r}", word
    elif value is None:
        for word in sorted(WORDS.get(str(steps[-1]), set())):
            yield f"now {word!r}", word
        yield "a number", 1
        yield "a word", "x"
    elif isinstance(value, list):
        if value:
            yield "last taken out", value[:-1]
            yield "last twice", [*value, copy.deepcopy(value[-1])]
            if len(value) > 1 and value[0] != value[1]:
                yield "first two exchanged", [value[1], value[0], *value[2:]]
        else:
            yield "a number put in", [1]
            yield "a word put in", ["x"]
    elif isinstance(value, dict):
        yield "emptied", {}
        yield "nothing", None


def tampered(data: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every record that differs from ``data`` in one place: its path, what was done, the record."""
    for steps, value in list(places(data)):
        for how, other in changes(steps, value):
            yield path_of(steps), how, replaced(data, steps, other)


def replaced(data: Any, steps: tuple[Step, ...], value: Any) -> Any:
    """A copy along one path."""
    if not steps:
        return value
    made = copy.copy(data)
    made[steps[0]] = replaced(data[steps[0]], steps[1:], value)
    return made
