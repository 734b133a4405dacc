"""One run's place in the reuse ledger: which attempt at its prompt it is, what it may spend, whether it may look.

The number is reserved before the run and counts once its draws are read (correction 1, decision 7).
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from functools import partial

from entroprefill_rag import __version__
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ConfigError, LedgerError
from entroprefill_rag.ledger import Grant, Refused, ReuseLedger
from entroprefill_rag.ledger.reuse import SEEDS_PER_PROMPT
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.record import ModelInfo, Reason
from entroprefill_rag.rule.attempts import delta_of_attempt
from entroprefill_rag.rule.monitor import Monitor

# What cannot change an audit's outcome on a given prompt. A new setting counts as one that can.
IRRELEVANT: dict[str, bool | set[str]] = {
    "enabled": True,
    "dual_bound": True,
    "decode_monitor": True,
    "drift_threshold": True,
    "on_drift": True,
    "overflow": True,  # changes the prompt, or nothing
    "include_text": True,
    "audit": {"seed"},
}

_REUSED = {
    "changed": "The draws of seed {seed} were seen at this prompt (attempt {attempt}), and something has changed since:"
    " a setting, the chunks' bounds or protection, or how the model runs",
    "under_way": "Another run is using the draws of seed {seed} at this prompt, with other settings",
    "forgotten": f"At this prompt the ledger knows the last {SEEDS_PER_PROMPT} seeds only, and seed {{seed}} is not "
    "among them: whether its draws were seen cannot be told",
}


@dataclass
class Attempt:
    """What the ledger said.

    Attributes:
        monitor: decides at monitored layers; None where nothing will be pruned, and `refusal` says why.
        number: ``r``; None without a ledger, or where nothing is drawn.
        replay: the draws were seen before, with this very configuration.
    """

    monitor: Monitor | None = None
    refusal: Reason | None = None
    number: int | None = None
    replay: bool = False
    grant: Grant | None = None

    def release(self) -> None:
        """Give the number back if no draw was read, and look at no more of them."""
        if self.grant is not None:
            self.grant.release()


def prompt_key(model: ModelInfo, layout: PromptLayout) -> str:
    """Names a prompt of a model.

    Observer distributions are no part of it: draws from two of them may be the same, and retrying with another one is
    another attempt all the same.
    """
    return json.dumps([model.name, model.revision, model.fingerprint, layout.hash])


def configuration_key(config: PruningConfig, model: ModelInfo, layout: PromptLayout, layers: tuple[int, ...]) -> str:
    """Names everything but prompt and seed that could change what is proposed or how it is judged."""
    told = {
        "config": config.model_dump(mode="json", exclude=IRRELEVANT),
        # By its name alone a function cannot be told from another one.
        "weights": secrets.token_hex(16) if callable(config.head_weights) else None,
        "layers": layers,
        "layout": [layout.chunk_spans, layout.suffix_span, layout.query_span, layout.sink_tokens, layout.removable],
        "runs": [model.dtype, model.kernel, model.device.partition(":")[0], __version__],
    }
    return json.dumps(told, sort_keys=True)


def begin_attempt(
    ledger: ReuseLedger | None, config: PruningConfig, layout: PromptLayout, layers: tuple[int, ...], model: ModelInfo
) -> Attempt:
    """Reserve an attempt and fix its audit.

    Args:
        ledger: who has looked at which draws; None for none.
        config: what may be removed.
        layout: the prompt.
        layers: monitored layers.
        model: the model.

    Raises:
        ConfigError: the audit can never pass, not even at the first attempt; or ``attempts="all"`` without a ledger.
    """
    audit = config.audit
    # 53 bits: every reader of JSON keeps the number exact.
    seed = secrets.randbits(53) if audit.seed is None else audit.seed
    make = partial(_monitor, config, layout, layers, model, seed)
    if audit.method == "enumerate":
        return Attempt(make(audit.delta))
    if ledger is None:
        if audit.attempts == "all":
            raise ConfigError(
                "attempts='all' shares delta among all attempts at a prompt, and this backend was made with "
                "ledger=False, which counts none; leave `ledger` out, or set attempts='each'"
            )
        return Attempt(make(audit.delta))
    names = prompt_key(model, layout), configuration_key(config, model, layout, layers)
    try:
        answer = ledger.reserve(*names, seed, fresh=audit.seed is None)
    except LedgerError as error:
        return Attempt(refusal=_failed(error))
    attempt = Attempt(number=answer.attempt, grant=answer if isinstance(answer, Grant) else None)
    shared = audit.attempts == "all"
    try:
        attempt.monitor = make(delta_of_attempt(audit.delta, answer.attempt) if shared else audit.delta)
    except ConfigError as error:
        attempt.release()
        if not shared or answer.attempt == 1:
            raise
        make(delta_of_attempt(audit.delta, 1))  # raises where the configuration itself is wrong
        return Attempt(refusal=_spent_up(error, answer.attempt, audit.delta))
    if not attempt.monitor.draws:
        # Whoever has seen all of the support may see it again.
        attempt.release()
        return Attempt(attempt.monitor, number=answer.attempt if shared else None)
    if isinstance(answer, Refused):
        return Attempt(refusal=_reused(answer, seed, config))
    attempt.replay = answer.replay
    attempt.monitor.before_audit = partial(_spend, answer)
    return attempt


def _monitor(
    config: PruningConfig,
    layout: PromptLayout,
    layers: tuple[int, ...],
    model: ModelInfo,
    seed: int,
    delta: float,
) -> Monitor:
    if delta != config.audit.delta:
        config = config.model_copy(update={"audit": config.audit.model_copy(update={"delta": delta})})
    return Monitor(config, layout, layers, model.query_heads, model.kv_heads, seed=seed)


def _spend(grant: Grant) -> Reason | None:
    """Called before the draws are read; a reason not to."""
    try:
        grant.spend()
    except LedgerError as error:
        return _failed(error)
    return None


def _failed(error: LedgerError) -> Reason:
    message = f"Without a note in the reuse ledger no draw may be read: {error}."
    return Reason(code="ledger_failed", message=message)


def _spent_up(error: ConfigError, attempt: int, delta: float) -> Reason:
    message = (
        f"Attempt {attempt} at this prompt may spend {delta_of_attempt(delta, attempt):.3g} of delta={delta:g}, and "
        f"with that {error}"
    )
    return Reason(code="attempts_spent", message=message)


def _reused(refused: Refused, seed: int, config: PruningConfig) -> Reason:
    message = _REUSED[refused.why].format(seed=seed, attempt=refused.attempt)
    if callable(config.head_weights):
        message += " (a function as `head_weights` counts as changed, always)"
    message += ". Leave `audit.seed` out for fresh draws"
    if refused.why == "changed":
        message += ", or restore what was changed for a replay"
    return Reason(code="audit_reused", message=message + ".")
