"""What a record says in words: exact, probabilistic and conditional are different words, never mixed (section 10)."""

from __future__ import annotations

from collections.abc import Sequence

from entroprefill_rag.record import AuditSetup, ChunkInfo, Claims, LayerTrial, ObserverInfo

# Share of the pooled chunk mass above which one chunk is called dominant: it may have pushed honest chunks out.
DOMINANT_SHARE = 0.6

NOT_CLAIMED = (
    "the worst observer, or any single position outside the proposal rows",
    "attention while decoding, or at any other layer",
    "that a chain of evidence over several chunks survives",
    "that the model's output is unchanged",
    "that the removed chunks hold no evidence, or that a retained chunk is honest",
    "any speed-up",
)

_DISTRIBUTIONS = {
    "suffix_rows": "the {n} rows of the query and the template's tail",
    "weighted_rows": "the {n} rows of the query and the template's tail, each weighing {decay:g} of the next",
    "prompt_rows": "the {n} rows from the first document to the end, of which a removed one loses nothing",
    "probe_queries": "a bank of {n} questions over the same documents, each taken as the mean over its own rows",
}

_CONDITIONAL = (
    "The output of the pruned run is bounded against the full run only under assumptions L, D, V and M "
    "(docs/guarantees.md); none of them is checked by this record."
)
_OTHER_MODEL = (
    "These statements are about this model's attention. Another model that reads the retained chunks as a shortened "
    "prompt is outside all of them."
)


def describe(
    trial: LayerTrial,
    setup: AuditSetup,
    chunks: Sequence[ChunkInfo],
    rows: int,
    *,
    for_other_model: bool,
    seeded: bool,
    replay: bool = False,
) -> Claims:
    """Word the claims of an accepted trial.

    Args:
        trial: the accepted trial.
        setup: what was fixed before the attention was seen.
        chunks: the prompt's chunks, in order.
        rows: number of proposal rows.
        for_other_model: the retained chunks go to another model (filter mode).
        seeded: the audit's seed was given by the caller.
        replay: the draws were seen before, with the same configuration.
    """
    removed = len(trial.removed)
    largest = trial.max_discarded if trial.max_discarded is not None else 0.0
    envelope = trial.envelope if trial.envelope is not None else 1.0
    exact = [
        f"At layer {trial.layer}, none of {setup.query_heads} heads places more than {largest:.4f} of its attention on "
        f"the {removed} removed chunks in any of the {rows} proposal rows (within its cap, slack "
        f"{trial.cap_slack or 0.0:.4f}; pooled envelope {envelope:.4f})."
    ]
    probabilistic = []
    warnings = []
    named = {info.kind: _named(info) for info in setup.observers}
    for audit in trial.audits:
        worst = max(audit.upper, default=0.0)
        if audit.method == "enumerate":
            exact.append(
                f"The exact mean over the support of {named[audit.observer]} is at most {worst:.4f} for every head, "
                f"against a limit of {audit.limit:g}."
            )
        else:
            draws = f"{audit.m} draws" if audit.announced is None else f"{audit.m} of at most {audit.announced} draws"
            probabilistic.append(
                f"The mean over {named[audit.observer]} of the attention that layer {trial.layer} places on the "
                f"removed chunks is at most {audit.limit:g} for every head (upper bound {worst:.4f} from {draws})."
            )
        if audit.caps_imply:
            warnings.append(f"The caps on the proposal rows alone already imply the statement on '{audit.observer}'.")
    if probabilistic:
        probabilistic.append(_how_likely(setup))
    if replay:
        warnings.append(
            "A replay: these draws were seen before, with this configuration. The statements are those of "
            f"{_which(setup)}; running it again adds nothing to them."
        )
    if probabilistic and seeded:
        warnings.append(
            "The audit's seed was given: the draws can be replayed, and foreseen. Against somebody who knows the seed, "
            "and can write a document or choose a setting, the sampled audit guarantees nothing."
        )
    total = sum(trial.pooled_mass)
    for chunk, mass in zip(chunks, trial.pooled_mass, strict=False):
        if len(chunks) > 2 and total > 0 and mass / total > DOMINANT_SHARE:
            warnings.append(
                f"Chunk {chunk.id!r} draws {mass / total:.0%} of the attention on chunks: where documents are not "
                "trusted, it may have displaced others."
            )
    return Claims(
        exact=" ".join(exact) + " Exact for these rows in float32, up to rounding against the model's own kernel.",
        probabilistic=" ".join(probabilistic) or None,
        conditional=_OTHER_MODEL if for_other_model else _CONDITIONAL,
        not_claimed=NOT_CLAIMED,
        warnings=tuple(warnings),
    )


def _named(info: ObserverInfo) -> str:
    """A distribution with its support and weights."""
    return f"'{info.kind}' ({_DISTRIBUTIONS[info.kind].format(n=info.support, decay=info.decay or 1.0)})"


def _how_likely(setup: AuditSetup) -> str:
    """For which attempts, together or alone, the probability of accepting falsely is bounded, and by how much."""
    if setup.attempt is None or setup.attempts == "each":
        counted = (
            "no ledger was kept of others at this prompt"
            if setup.attempt is None
            else f"it is {_which(setup)}, as far as the ledger goes back"
        )
        return (
            "Probability, per attempted request, of accepting although a statement is false: at most "
            f"{setup.delta:g}. For this attempt only ({counted}): trying until one passes errs more often."
        )
    together = setup.delta * setup.attempt * (setup.attempt + 1)
    return (
        "Probability of accepting although a statement is false: at most "
        f"{setup.delta:g} in {_which(setup)}, and at most {together:g} in all attempts at it together that share a "
        "delta no larger than that in the same way, as far as the ledger goes back."
    )


def _which(setup: AuditSetup) -> str:
    return f"attempt {setup.attempt} at this prompt"
