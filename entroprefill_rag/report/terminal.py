"""A record as rich renderables: sources, audit, layers, claims. Text of strangers goes in as plain ``Text`` only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from entroprefill_rag.record import AuditRecord, AuditResult, DecodeMonitor, LayerTrial, Reason, Timings, Usage
from entroprefill_rag.report.drift import drift_line
from entroprefill_rag.report.plain import one_line, plain
from entroprefill_rag.report.sources import Source, sources_of
from entroprefill_rag.request import Chunk

_STYLES = {"kept": "green", "dropped": "red", "protected": "cyan", "not admitted": "yellow"}
_EXCERPT = 240


def sources_table(sources: Sequence[Source]) -> Table:
    """The sources in prompt order. Numbers are places in the prompt; a dropped one is struck out of the answer.

    A chunk that ranked among those to go and stayed has what held it in a line of its own.
    """
    table = Table(title="Sources, in prompt order", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold", ratio=1)
    table.add_column("", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    with_scores = any(source.score is not None for source in sources)
    with_shares = any(source.mass_share is not None for source in sources)
    if with_scores:
        table.add_column("score", justify="right", no_wrap=True)
    with_evidence = any(source.evidence is not None for source in sources)
    if with_evidence:
        table.add_column("evidence", justify="right", no_wrap=True)
    if with_shares:
        table.add_column("attention", justify="right", no_wrap=True)
    for source in sources:
        cells: list[RenderableType] = [
            Text(_known(source.number)),
            _named_and_held(source),
            Text(source.status, style=_STYLES[source.status]),
            Text(_known(source.tokens)),
        ]
        if with_scores:
            cells.append(Text("" if source.score is None else f"{source.score:.2f}"))
        if with_evidence:
            cells.append(Text("" if source.evidence is None else f"{source.evidence:.0%}"))
        if with_shares:
            cells.append(Text("" if source.mass_share is None else f"{source.mass_share:.0%}"))
        table.add_row(*cells, style="dim" if source.status in ("dropped", "not admitted") else None)
    if with_evidence and any(source.status == "dropped" for source in sources):
        table.caption = (
            "Least evidence per token goes first, as far as caps allow; the score of retrieval plays no part."
        )
        table.caption_justify = "left"
    return table


def dropped_texts(record: AuditRecord, chunks: Sequence[Chunk]) -> RenderableType:
    """How the dropped chunks begin, so that a reader can judge what was left out."""
    known = {chunk.id: chunk.text for chunk in chunks}
    known.update({info.id: info.text for info in record.prompt.chunks if info.text is not None})
    lines: list[RenderableType] = []
    for source in sources_of(record, chunks):
        if source.status == "dropped":
            lines.append(Text.assemble((f"{source.number}  ", "red"), _named(source)))
            text = known.get(source.id)
            shown = one_line(text, _EXCERPT) if text is not None else "(its text is not in the record)"
            lines.append(Padding(Text(shown, style="dim"), (0, 0, 0, 3)))
    return Group(Text("Dropped", style="bold"), *(lines or [Text("nothing", style="dim")]))


def audit_panel(record: AuditRecord, usage: Usage | None = None, timings: Timings | None = None) -> Panel:
    """What was decided and on which numbers; for a bypass, why nothing was removed."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in _facts(record, usage, timings):
        grid.add_row(label, value)
    colour = {"pruned": "green", "bypassed": "yellow", "off": "blue"}[record.outcome]
    return Panel(grid, title=f"audit: {record.outcome}", title_align="left", border_style=colour, expand=False)


def layers_table(record: AuditRecord) -> Table:
    """Every monitored layer that was tried."""
    table = Table(title="Layers", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("layer", justify="right", no_wrap=True)
    for name in ("document mass", "saved", "worst row / cap", "worst head / limit"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    cap = _cap(record)
    for trial in record.trials:
        worst = "" if trial.max_discarded is None else f"{trial.max_discarded:.3f}{f' / {cap}' if cap else ''}"
        audits = "\n".join(f"{max(one.upper, default=0.0):.3f} / {one.limit:g}" for one in trial.audits)
        table.add_row(
            str(trial.layer),
            f"{trial.doc_mass:.3f}",
            f"{trial.tokens_saved} ({trial.saved_share:.0%})" if trial.removed else "",
            worst,
            audits,
            Text(verdict_line(trial.verdict)),
            style="green" if trial.layer == record.accepted_layer else None,
        )
    return table


def claims_text(record: AuditRecord) -> RenderableType:
    """What the record says, each statement under the word for its strength, and what it does not say."""
    claims = record.claims
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in (
        ("exact", claims.exact),
        ("probabilistic", claims.probabilistic),
        ("conditional", claims.conditional),
    ):
        if text:
            grid.add_row(label, Text(plain(text)))
    if claims.not_claimed:
        grid.add_row("not claimed", Text("\n".join(one_line(text, 400) for text in claims.not_claimed), style="dim"))
    if not grid.row_count:
        grid.add_row("claims", Text("none: nothing was removed", style="dim"))
    return grid


def warnings_text(record: AuditRecord) -> RenderableType | None:
    """The record's warnings, and what had to be changed in the prompt."""
    lines = [*record.claims.warnings, *(f"prompt: {note}" for note in record.prompt.notes)]
    if not lines:
        return None
    return Text("\n".join(f"note: {one_line(line, 400)}" for line in lines), style="yellow")


def record_report(record: AuditRecord, chunks: Sequence[Chunk] = ()) -> RenderableType:
    """Everything of a record that fits a terminal, as ``entroprefill show`` prints it."""
    head = Text(one_line(f"{record.model.name}, {record.model.dtype} on {record.model.device}; {record.created}"))
    parts: list[RenderableType] = [head, sources_table(sources_of(record, chunks)), audit_panel(record)]
    if record.trials:
        parts.append(layers_table(record))
    parts.append(claims_text(record))
    if (warnings := warnings_text(record)) is not None:
        parts.append(warnings)
    return Group(*parts)


def _facts(record: AuditRecord, usage: Usage | None, timings: Timings | None) -> Iterator[tuple[str, RenderableType]]:
    chunks = record.prompt.chunks
    tokens = sum(info.end - info.start for info in chunks)
    trial = record.trial
    if record.outcome == "pruned":
        share = record.tokens_removed / tokens if tokens else 0.0
        yield (
            "dropped",
            f"{len(record.dropped_ids)} of {counted(len(chunks), 'chunk')}, {record.tokens_removed:,} of {tokens:,} "
            f"chunk tokens ({share:.0%}), after layer {record.accepted_layer} of {record.model.layers} "
            "(counted from 0)",
        )
    else:
        yield "nothing dropped", Text(verdict_line(record.reason))
    if trial is not None:
        yield "document mass", f"{trial.doc_mass:.3f} of the attention at layer {trial.layer}"
        yield from _limits(record, trial)
    if record.decode is not None:
        yield "decoding", _decode_line(record.decode)
    if usage is not None:
        kept = f", {usage.kept_tokens:,} above layer {record.accepted_layer}" if record.outcome == "pruned" else ""
        given_up = f", {usage.given_up_tokens:,} more given up" if usage.given_up_tokens else ""
        yield "tokens", f"{usage.prompt_tokens:,} in the prompt{kept}; {usage.generated_tokens:,} generated{given_up}"
    if timings is not None:
        given_up = f", pruned run given up {timings.given_up:.2f}" if timings.given_up else ""
        rate = usage.generated_tokens / timings.decode if usage and timings.decode > 0 else None
        yield (
            "time",
            f"first token {timings.first_token:.2f} s (prefill {timings.shallow + timings.deep:.2f}, rule and audit "
            f"{timings.rule:.2f}{given_up}), decoding {timings.decode:.2f} s"
            + (f", {rate:.0f} tokens/s" if rate else ""),
        )


def _limits(record: AuditRecord, trial: LayerTrial) -> Iterator[tuple[str, RenderableType]]:
    if trial.max_discarded is not None:
        cap = _cap(record)
        limit = f"at most {cap} allowed" if cap else "one cap a row"
        slack = "" if trial.cap_slack is None else f", closest {trial.cap_slack:.3f} below its cap"
        yield "row caps", f"{trial.max_discarded:.3f} discarded in the worst head and row ({limit}{slack})"
    for audit in trial.audits:
        yield "audit", _audit_line(audit)


def _audit_line(audit: AuditResult) -> RenderableType:
    head = max(range(len(audit.upper)), key=audit.upper.__getitem__, default=0)
    worst = audit.upper[head] if audit.upper else 0.0
    if audit.method == "enumerate":
        how, relation = f"exact mean over {counted(audit.m, 'row')}", "is"
    else:
        how, relation = f"{audit.bound} bound from {counted(audit.m, 'draw')}", "is at most"
    return Text.assemble(
        f"{one_line(audit.observer, 40)}: worst head {head} {relation} {worst:.3f}, limit {audit.limit:g} ({how}): ",
        ("pass", "green") if audit.accepted else ("fail", "red"),
    )


def _decode_line(seen: DecodeMonitor) -> Text:
    if not seen.max_per_token:
        return Text("no generated token was fed back, so none was looked at")
    worst = max(range(seen.tokens), key=seen.max_per_token.__getitem__)
    told = Text(
        f"largest mass on removed chunks {seen.max_per_token[worst]:.3g} (token {worst + 1} of {seen.tokens}), mean "
        f"{seen.mean:.3g}, threshold {seen.threshold:g}"
    )
    drift = drift_line(seen)
    return told.append(" not exceeded") if drift is None else told.append(f"; {drift}", style="bold yellow")


def _cap(record: AuditRecord) -> str | None:
    """The cap of all proposal rows; None where rows have caps of their own."""
    cap = record.config.get("eps_row")
    return f"{cap:g}" if isinstance(cap, (int, float)) else None


def _named(source: Source) -> Text:
    where = one_line(source.path or source.id, 120)
    title = one_line(source.title, 120)
    text = Text(title or where)
    if title and title != where:
        text.append(f"  {where}", style="dim")
    return text


def _named_and_held(source: Source) -> Text:
    named = _named(source)
    if source.status == "kept" and source.reason is not None:
        named.append(f"\n{one_line(source.reason, 80)}", style="dim")
    return named


def verdict_line(reason: Reason) -> str:
    """A reason with its stable code in front, which is what documentation and scripts name it by."""
    return f"{one_line(reason.code, 60)}: {one_line(reason.message, 400)}"


def counted(number: int, what: str) -> str:
    """``1 chunk``, ``2 chunks``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _known(number: int | None) -> str:
    return "" if number is None else str(number)
