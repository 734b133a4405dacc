"""Checks of the outcome: what stays, the reason given, the words of the claims, and what was seen while decoding."""

from __future__ import annotations

from collections import defaultdict

from entroprefill_rag.claims import describe
from entroprefill_rag.record import AuditRecord, Claims, DecodeMonitor, LayerTrial, Reason
from entroprefill_rag.rule.monitor import VERDICTS
from entroprefill_rag.rule.proposal import Proposer
from entroprefill_rag.verify.facts import Facts
from entroprefill_rag.verify.findings import Findings

OFF = "Pruning was switched off; the prompt was prefilled in full."

IN_THE_WAY = (
    "generation_mode",
    "no_cache",
    "cache_implementation",
    "prompt_split",
    "guidance",
    "custom_generate",
    "window_kernel",
    "layer_arguments",
    "attention_shape",
    "no_monitored_layer",
    "no_chunks",
    "audit_reused",
    "attempts_spent",
    "ledger_failed",
)
"""Codes of refusals that come from the model, its cache, the way of decoding or the reuse ledger."""

IN_THE_WAY_OF = ("model_", "probe_")
"""Beginnings of such codes."""


def check_outcome(facts: Facts, found: Findings) -> None:
    """Outcome, accepted layer, retained chunks, reason and claims, from the trials."""
    record = facts.record
    reached = next((trial for trial in record.trials if trial.verdict.code == "accepted"), None)
    with found.part("decode"):
        _check_decode(facts, reached, found)
    accepted = None if given_up(record) else reached
    outcome = "off" if not facts.config.enabled else "bypassed" if accepted is None else "pruned"
    found.expect("outcome", record.outcome, outcome, "pruned where a layer was accepted, off where so configured")
    layer = None if accepted is None else accepted.layer
    found.expect("accepted_layer", record.accepted_layer, layer, "the first layer that passed")
    removed = () if accepted is None else accepted.removed
    kept = [i not in removed for i in range(len(record.prompt.chunks))]
    for i, (chunk, follows) in enumerate(zip(record.prompt.chunks, kept, strict=True)):
        found.expect(f"prompt.chunks[{i}].kept", chunk.kept, follows, "the accepted layer's set is removed")
    saved = 0 if accepted is None else accepted.tokens_saved
    found.expect("tokens_removed", record.tokens_removed, saved, "the accepted layer's set is removed")
    with found.part("reason"):
        _check_reason(facts, accepted, found)
    with found.part("claims"):
        _check_claims(facts, accepted, found)


def given_up(record: AuditRecord) -> bool:
    """Whether a pruned answer was given up for one from a full prefill."""
    return record.decode is not None and record.decode.action == "restarted_full"


def check_layers(facts: Facts, found: Findings) -> None:
    """Which layers are monitored, which rows propose; neither where nothing was to be looked at."""
    record, config = facts.record, facts.config
    monitored, last = record.layers, record.model.layers - 1
    found.require(
        list(monitored) == sorted(set(monitored)) and all(0 < layer < last for layer in monitored),
        "layers",
        monitored,
        f"ascending, from 1 to {last - 1}",
        "layer 0 stays full, and after the last nothing is left to save",
    )
    if monitored and config.layers != "auto":
        found.expect("layers", monitored, config.layers, "as configured")
    watched = bool(monitored) or record.audit is not None or bool(record.proposal_rows)
    follows = facts.rows if watched else ()
    found.expect("proposal_rows", record.proposal_rows, follows, "the last of the suffix, at most half of it")
    if monitored:
        rule = "monitored layers are audited"
        found.require(record.audit is not None, "audit", None, "what was fixed beforehand", rule)


def _check_reason(facts: Facts, accepted: LayerTrial | None, found: Findings) -> None:
    record, reason = facts.record, facts.record.reason
    if accepted is not None:
        found.expect("reason", reason.model_dump(), accepted.verdict.model_dump(), "the accepted layer's verdict")
        return
    if not facts.config.enabled:
        found.expect("reason", reason.model_dump(), Reason(code="off", message=OFF).model_dump(), "pruning was off")
        return
    if record.decode is not None and given_up(record):
        follows = _drifted(record.decode)
        found.expect("reason", reason.model_dump(), follows.model_dump(), "the pruned answer drifted")
        return
    bypass = _bypass(facts)
    if bypass is not None and record.proposal_rows:
        found.expect("reason", reason.model_dump(), bypass.model_dump(), "known before any attention was read")
        found.expect("layers", record.layers, (), "nothing is monitored where nothing may be removed")
        return
    if reason.code.startswith(IN_THE_WAY_OF) or reason.code in IN_THE_WAY:
        # What the run met cannot be seen in the record; but it had not come to its end.
        short = not record.layers or len(record.trials) < len(record.layers)
        rule = "a run that was refused did not observe every layer"
        found.require(short, "reason.code", reason.code, "no_layer_accepted", rule)
        if reason.code == "no_chunks":
            found.expect("prompt.chunks", len(record.prompt.chunks), 0, "the reason says that there is none")
        return
    if not record.trials:
        follows = Reason(code="not_observed", message=VERDICTS["not_observed"])
        found.expect("reason", reason.model_dump(), follows.model_dump(), "no layer was observed")
        return
    found.expect("trials", len(record.trials), len(record.layers), "every monitored layer is tried before giving up")
    layers: dict[str, list[str]] = defaultdict(list)
    for trial in record.trials:
        layers[trial.verdict.code].append(str(trial.layer))
    why = "; ".join(f"{code} at {', '.join(where)}" for code, where in layers.items())
    message = f"None of the {len(record.trials)} layers observed was accepted: {why}."
    follows = Reason(code="no_layer_accepted", message=message)
    found.expect("reason", reason.model_dump(), follows.model_dump(), "every layer was rejected")


def _drifted(seen: DecodeMonitor) -> Reason:
    place = seen.first_above or 0
    message = (
        f"Generated token {place + 1} placed {seen.max_per_token[place]:.4g} of a head's attention at layer "
        f"{seen.layer} on the removed chunks, above {seen.threshold:g}: the pruned answer was given up after "
        f"{seen.tokens + 1} tokens, and the prompt was prefilled in full."
    )
    return Reason(code="drift_restart", message=message)


def _bypass(facts: Facts) -> Reason | None:
    """Why the prompt could not be pruned whatever its attention; None where it could."""
    why = Proposer(facts.config, facts.layout(), facts.record.model.kv_heads).why_not()
    if why is not None or facts.record.audit is None:
        return why
    narrow = [info.kind for info in facts.record.audit.observers if info.support < 2]
    if not narrow:
        return None
    message = f"The distribution {narrow[0]!r} holds one row of this prompt: a look at one token is no audit."
    return Reason(code="audit_support", message=message)


def _check_claims(facts: Facts, accepted: LayerTrial | None, found: Findings) -> None:
    record, setup = facts.record, facts.record.audit
    if record.replay:
        counted = setup is not None and setup.attempt is not None
        found.require(counted, "replay", True, "false", "only draws that a ledger knows are replayed")
    if accepted is None or setup is None:
        found.expect("claims", record.claims.model_dump(), Claims().model_dump(), "nothing removed, nothing claimed")
        return
    ours, others = (
        describe(
            accepted,
            setup,
            record.prompt.chunks,
            rows=len(record.proposal_rows),
            for_other_model=for_other_model,
            seeded=facts.config.audit.seed is not None,
            replay=record.replay,
        )
        for for_other_model in (False, True)
    )
    # A run that ended before decoding may have been made for another model.
    early = not accepted.row_max
    follows = others if early and record.claims.conditional == others.conditional else ours
    found.expect("claims", record.claims.model_dump(), follows.model_dump(), "worded from the numbers of the record")


def _check_decode(facts: Facts, accepted: LayerTrial | None, found: Findings) -> None:
    record, config, seen = facts.record, facts.config, facts.record.decode
    # Row maxima are there once an answer has come to its end.
    watched = accepted is not None and bool(accepted.row_max) and config.decode_monitor
    found.expect("decode", seen is not None, watched, "watched while a pruned answer was decoded, if so configured")
    if seen is None or accepted is None:
        return
    found.expect("decode.layer", seen.layer, accepted.layer, "the accepted layer still holds every key")
    threshold = config.drift_threshold if config.drift_threshold is not None else float(facts.caps.max())
    found.expect("decode.threshold", seen.threshold, threshold, "drift_threshold, else the largest eps_row")
    found.expect("decode.on_drift", seen.on_drift, config.on_drift, "as configured")
    found.expect("decode.tokens", seen.tokens, len(seen.max_per_token), "one number per token read")
    _check_drift(seen, record.model.query_heads, found)


def _check_drift(seen: DecodeMonitor, heads: int, found: Findings) -> None:
    values = list(seen.max_per_token)
    found.between("decode.max_per_token", values, [0.0] * len(values), [1.0] * len(values), "masses")
    mean = sum(values) / max(len(values), 1)
    found.between("decode.mean", [seen.mean], [mean / heads], [mean], "a mean over heads, of their maxima")
    first = next((i for i, value in enumerate(values) if value > seen.threshold), None)
    found.expect("decode.first_above", seen.first_above, first, "the first token above the threshold")
    acted = {"record": "none", "stop": "stopped", "restart_full": "restarted_full"}[seen.on_drift]
    found.expect("decode.action", seen.action, acted if first is not None else "none", "what on_drift says")
