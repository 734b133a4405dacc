"""Writes the pages that come from the code: configuration.md, observers.md and record.schema.json in docs/.

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
from entroprefill_rag.rule.draws import DELTA, EPS_AUDITS, ETA_HATS, STATEMENTS, observers_table

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


OBSERVERS = f"""# How many observers an audit takes

Written by `python docs/generate.py`; `entroprefill observers` prints the same. Each number is the smallest `m_a` at
which a head with the mean loss `eta_hat` passes, at `delta = {DELTA}` shared by `J * H_Q` statements (monitored layers
times query heads), one sampled distribution. All bounds are valid; a smaller number is less to read.

The number depends on the losses, not only on their mean. **constant**: every observer loses `eta_hat`. **0/1**: an
observer loses all of its attention or nothing. Other losses of that mean, in no particular order, lie between the two;
Hoeffding's bound and KL know the mean only. A dash: the mean is at or above the limit, and nothing passes.

**Why betting is the default.** Where nothing is lost, betting needs what KL needs, to a few draws, and far less than
Hoeffding. Where something is lost, by all observers about alike, it needs the fewest of all: at `eta_hat = 0.1`,
`eps_audit = 0.2` and 72 statements, [betting] against [kl] (KL), [empirical_bernstein] (empirical Bernstein) and
[hoeffding] (Hoeffding). Where an observer loses all or nothing, KL needs fewer. What one row of attention places on the
removed chunks is a sum over many keys, nearer to the first case than to the second; whoever expects the second sets
`bound="kl"` beforehand. And a bet may be watched: only it allows `sequential=True`.
"""


def observers() -> str:
    """The table of observers needed, in Markdown."""
    cells = {(one.bound, one.losses, one.eta_hat, one.eps_audit, one.statements): one.m for one in observers_table()}
    bounds = (("Hoeffding", "hoeffding"), ("KL", "kl"), ("Bernstein", "empirical_bernstein"), ("betting", "betting"))
    text = OBSERVERS
    for _, bound in bounds:
        text = text.replace(f"[{bound}]", str(cells[bound, "constant", 0.1, 0.2, 72]))
    lines = [text]
    for eta in ETA_HATS:
        spread = [
            (f"{name}, {label}" if kind and eta else name, bound, losses)
            for name, bound in bounds
            for label, losses in (("constant", "constant"), ("0/1", "zero_one"))
            for kind in [bound in ("empirical_bernstein", "betting")]
            if losses == "constant" or (kind and eta)
        ]
        lines += [
            f"## eta_hat = {eta:g}",
            "",
            "| eps_audit | J * H_Q | " + " | ".join(name for name, *_ in spread) + " |",
        ]
        lines.append("|---|---|" + "---:|" * len(spread))
        for eps in EPS_AUDITS:
            for count in STATEMENTS:
                values = (cells[bound, losses, eta, eps, count] for _, bound, losses in spread)
                shown = " | ".join("–" if value is None else str(value) for value in values)
                lines.append(f"| {eps:g} | {count} | {shown} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


WORTH = (
    ("full", "full prefill"),
    ("cap-0.1", "EntroPrefill, caps .1"),
    ("ours", "EntroPrefill, defaults (caps .2)"),
    ("layer", 'EntroPrefill, caps .2, `evidence="layer"`'),
    ("cap-0.3", "EntroPrefill, caps .3"),
    ("cap-0.5", "EntroPrefill, caps .5"),
    ("embedder", "short prompt, chosen by an embedder"),
    ("midprefill-mean", "FastKV's rule, no caps"),
    ("random", "short prompt, chosen at random"),
    ("gold", "gold chunks alone (oracle)"),
)


def readme() -> str:
    """The README with its one table of measurements, from the benchmark's summary."""
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    summary = json.loads((HERE / "benchmark" / "summary.json").read_text(encoding="utf-8"))
    methods = {method["name"]: method for method in summary["methods"]}
    lines = [
        "| method | chunk tokens kept | need met | answer found | first token, s | speed-up |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, label in WORTH:
        one = methods[name]
        means = {key: f"{one[key]['mean']:.2f}" for key in ("kept_share", "need_met", "found", "ttft", "speedup")}
        for key in ("need_met", "found"):
            means[key] += f" [{one[key]['low']:.2f}, {one[key]['high']:.2f}]"
        lines.append(f"| {label} | {' | '.join(means.values())} |")
    begin, end = "<!-- benchmark: python docs/generate.py -->\n", "<!-- end -->"
    before, _, rest = text.partition(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    return {
        HERE / "configuration.md": configuration(),
        HERE / "observers.md": observers(),
        HERE / "record.schema.json": record_schema(),
        HERE.parent / "README.md": readme(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
