"""Writes the pages that come from the code: docs/configuration.md and docs/record.schema.json.

Run ``python docs/generate.py``; a test holds the committed pages equal to what this makes.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from entroprefill_rag.config import (
    AuditConfig,
    HeadProfile,
    ProbeQueries,
    PromptRows,
    PruningConfig,
    SuffixRows,
    WeightedRows,
)
from entroprefill_rag.record import AuditRecord

HERE = Path(__file__).parent
SHOWN: tuple[type[BaseModel], ...] = (
    PruningConfig,
    AuditConfig,
    SuffixRows,
    WeightedRows,
    PromptRows,
    ProbeQueries,
    HeadProfile,
)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return f"`{type(value).__name__}()`"
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return "`(" + ", ".join(f"{type(part).__name__}()" for part in value) + ")`"
    return f"`{value!r}`"


def _limits(schema: dict[str, object]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    variants = [schema, *(part for part in schema.get("anyOf", ()) if isinstance(part, dict))]  # type: ignore[attr-defined]
    found = [f"{signs[key]} {part[key]}" for part in variants for key in signs if key in part]
    choices = [repr(choice) for part in variants for choice in part.get("enum", ())]  # type: ignore[attr-defined]
    return ", ".join([*found, *choices])


def configuration() -> str:
    """The configuration reference, in Markdown."""
    lines = [
        "# Configuration",
        "",
        "Written by `python docs/generate.py` from `entroprefill_rag/config.py`. Every object is frozen; unknown names",
        "are refused. Symbols in brackets are those of [guarantees.md](guarantees.md).",
    ]
    for model in SHOWN:
        lines += ["", f"## {model.__name__}", "", (model.__doc__ or "").strip(), ""]
        properties = model.model_json_schema(mode="validation", schema_generator=_Schema).get("properties", {})
        rows = [(name, field) for name, field in model.model_fields.items() if name != "kind"]
        if not rows:
            lines.append("No settings.")
            continue
        lines += ["| name | default | limits | meaning |", "|---|---|---|---|"]
        for name, field in rows:
            limits = _limits(properties.get(name, {})).replace("|", "\\|")
            lines.append(f"| `{name}` | {_default(field)} | {limits} | {(field.description or '').replace('|', '/')} |")
    return "\n".join(lines) + "\n"


from pydantic.json_schema import GenerateJsonSchema  # noqa: E402  (kept beside its only use)


class _Schema(GenerateJsonSchema):
    def callable_schema(self, schema: object) -> dict[str, object]:
        return {}


def record_schema() -> str:
    """The JSON schema of a record."""
    return json.dumps(AuditRecord.model_json_schema(), indent=1) + "\n"


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    return {HERE / "configuration.md": configuration(), HERE / "record.schema.json": record_schema()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
