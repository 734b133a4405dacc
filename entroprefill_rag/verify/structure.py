"""Checks of what a record says before any attention: model sizes, the prompt's ranges, protection, text."""

from __future__ import annotations

import re
from datetime import datetime

from entroprefill_rag.record import AuditRecord
from entroprefill_rag.verify.facts import Facts
from entroprefill_rag.verify.findings import Findings

PROTECTIONS = ("caller", "empty", "sinks")


def check_ranges(record: AuditRecord, found: Findings) -> bool:
    """Whether the ranges of the prompt are ranges; nothing else can be computed where they are not."""
    prompt, before = record.prompt, len(found.found)
    start, end = prompt.suffix
    found.expect("prompt.suffix[1]", end, prompt.tokens, "the suffix ends where the prompt ends")
    found.require(0 <= start < end, "prompt.suffix", prompt.suffix, "0 <= start < end", "the suffix is not empty")
    if prompt.query_span is not None:
        first, last = prompt.query_span
        rule = "the query is in the suffix, and not empty"
        found.require(start <= first < last <= end, "prompt.query_span", prompt.query_span, f"in {prompt.suffix}", rule)
    at = 0
    for i, chunk in enumerate(prompt.chunks):
        found.require(
            at <= chunk.start <= chunk.end <= start,
            f"prompt.chunks[{i}]",
            (chunk.start, chunk.end),
            f"from {at} on, before the suffix at {start}",
            "chunks ascend, do not overlap and come before the suffix",
        )
        at = max(at, chunk.end)
    return len(found.found) == before


def check_structure(facts: Facts, found: Findings) -> None:
    """Model, prompt, protection and text (section 1)."""
    record, config = facts.record, facts.config
    model, prompt = record.model, record.prompt
    data = config.model_dump(mode="json")
    if facts.plugged_in:
        data["head_weights"] = record.config["head_weights"]
    found.expect("config", record.config, data, "a configuration names every setting")
    found.require(model.layers >= 1, "model.layers", model.layers, "at least 1", "a model has layers")
    found.require(
        1 <= model.kv_heads <= model.query_heads and model.query_heads % model.kv_heads == 0,
        "model.kv_heads",
        model.kv_heads,
        f"a divisor of {model.query_heads}",
        "query heads divide into groups of equal size",
    )
    found.require(
        re.fullmatch("[0-9a-f]{64}", prompt.hash) is not None,
        "prompt.hash",
        prompt.hash,
        "64 hexadecimal digits",
        "the prompt is named by a SHA-256",
    )
    names = [name for name in ("entroprefill_rag", "torch", "transformers") if name not in record.versions]
    found.expect("versions", names, [], "versions of what a record depends on are named")
    with found.part("created"):
        datetime.fromisoformat(record.created)
    found.expect("prompt.sink_tokens", prompt.sink_tokens, config.sink_tokens, "sinks are counted as configured")
    _protection(facts, found)
    ids = [chunk.id for chunk in prompt.chunks]
    unique = len({*ids, *prompt.not_admitted}) == len(ids) + len(prompt.not_admitted)
    found.require(unique, "prompt.chunks", ids, "each id once", "ids of chunks, admitted or not, are unique")
    if config.overflow == "error":
        found.expect("prompt.not_admitted", prompt.not_admitted, (), "overflow='error' leaves no chunk out")
    _text(facts, found)


def _protection(facts: Facts, found: Findings) -> None:
    sinks = facts.record.prompt.sink_tokens
    for i, chunk in enumerate(facts.record.prompt.chunks):
        if chunk.protected == "caller":
            continue
        follows = "empty" if chunk.start == chunk.end else "sinks" if chunk.start < sinks else None
        rule = "a chunk is protected by its caller, or because it is empty or reaches into the sinks"
        found.expect(f"prompt.chunks[{i}].protected", chunk.protected, follows, rule)


def _text(facts: Facts, found: Findings) -> None:
    record, wanted = facts.record, facts.config.include_text
    rule = "text is in the record exactly where include_text asks for it"
    held = [("prompt.query", record.prompt.query)]
    for i, chunk in enumerate(record.prompt.chunks):
        held += [(f"prompt.chunks[{i}].text", chunk.text), (f"prompt.chunks[{i}].title", chunk.title)]
    if not wanted:
        held.append(("answer", record.answer))
    for path, value in held:
        found.require((value is not None) == wanted, path, value, "text" if wanted else "null", rule)
