"""The numbers of a record, explained in a sentence each, with the page of the repository that says more."""

from __future__ import annotations

from dataclasses import dataclass

_HOW = "docs/how-it-works.md"
_CAPS = "docs/guarantees.md#exact-the-caps"
_AUDIT = "docs/guarantees.md#probabilistic-the-audit"
_SYMBOLS = "docs/guarantees.md#symbols"
_NOT_CLAIMED = "docs/guarantees.md#not-claimed"
_DECODING = "docs/guarantees.md#measured-while-decoding"
_SETTINGS = "docs/configuration.md"


@dataclass(frozen=True)
class Term:
    """What one number is called and what it says.

    Attributes:
        label: a few words.
        text: one or two sentences.
        href: page of the repository, by its name from the root.
    """

    label: str
    text: str
    href: str = _HOW


TERMS = {
    # The run.
    "chunks": Term("chunks dropped", "Chunks that the layers above the accepted one never saw, of all in the prompt."),
    "removed": Term("tokens removed", "Tokens of the dropped chunks, of all chunk tokens."),
    "prompt_tokens": Term("prompt tokens", "Length of the prompt, with instruction, chunks, query and template."),
    "accepted_layer": Term(
        "accepted layer",
        "The layer, counted from 0, whose proposal passed every check. It and those below ran on the whole prompt.",
    ),
    "kernel": Term("attention kernel", "The model's own attention implementation, which ran."),
    # The prompt.
    "tokens": Term("tokens", "Length of the chunk in the prompt, with its header line."),
    "score": Term("score", "Similarity to the question when the chunk was retrieved. Pruning does not use it."),
    "mass_share": Term(
        "attention",
        "Share of the pooled attention on chunks, at the accepted layer, else at the last one tried. It says what the "
        "question's last rows look at, not what is true or needed.",
        _NOT_CLAIMED,
    ),
    "evidence": Term(
        "evidence",
        "What the question's words look at beyond the words before it, as a share of what they look at on all chunks: "
        "mean over the profile's heads, of this layer and of earlier ones. It ranked the chunks: per token, the lowest "
        "go first. No limit is taken from it.",
        _SYMBOLS,
    ),
    # The layers.
    "pooled_mass": Term(
        "pooled mass", "A_i: attention that the proposal rows place on chunk i, heads pooled by weight.", _SYMBOLS
    ),
    "doc_mass": Term(
        "document mass",
        "Mean share of their attention that the proposal rows place on chunks. A layer where it is low looks "
        "elsewhere, so that it discards little whatever is removed; mass_min rejects it.",
        _NOT_CLAIMED,
    ),
    "saved": Term("saved", "Chunk tokens that the layer's proposal would remove, and their share."),
    "max_discarded": Term(
        "worst row",
        "Largest attention that any head places on the proposed chunks in any proposal row, against its cap "
        "(eps_row). Exact for these rows.",
        _CAPS,
    ),
    "bound_limit": Term(
        "audits", "Per observer distribution: the worst head's mean loss, or its bound, against the limit.", _AUDIT
    ),
    "streak": Term("streak", "Layers in a row, up to this one, that proposed nearly the same set.", _SETTINGS),
    "verdict": Term("verdict", "What became of the layer's proposal, and why."),
    # The heads.
    "weight": Term(
        "weight",
        "w[h]: how much the head counts in its GQA group's pooled mass; never below the floor zeta.",
        _SYMBOLS,
    ),
    "group": Term("group", "GQA group: query heads that share one head of keys and values.", _SYMBOLS),
    "head_discarded": Term(
        "worst row", "Largest attention that this head places on the proposed chunks in any proposal row.", _CAPS
    ),
    "envelope": Term(
        "envelope",
        "What the pooled loss alone would allow this head to lose in a row, at most 1. It is the price of pooling, "
        "and the reason why caps are per head and row.",
        _CAPS,
    ),
    # The audit.
    "delta": Term(
        "delta",
        "Probability, before the draws, of accepting although a sampled statement is false. It is not a probability "
        "given acceptance.",
        _AUDIT,
    ),
    "seed": Term(
        "seed", "From which the observers were drawn. A seed known beforehand voids the sampled audit.", _AUDIT
    ),
    "statements": Term("statements", "Monitored layers times query heads: how many delta is shared by.", _AUDIT),
    "m_a": Term(
        "draws planned", "Observers drawn from each sampled distribution, fixed before attention is read.", _AUDIT
    ),
    "attempt": Term("attempt", "Which attempt at this prompt, as far as the ledger goes back.", _AUDIT),
    "eta_hat": Term(
        "mean seen", "eta_hat: mean attention on the proposed chunks over the observers looked at.", _AUDIT
    ),
    "upper": Term(
        "at most",
        "Upper confidence bound on the mean over the whole distribution; where every row was read, the exact mean.",
        _AUDIT,
    ),
    "limit": Term("limit", "eps_audit: what the bound must not exceed, in every head.", _AUDIT),
    "level": Term("level", "Probability of error spent on each head's statement.", _AUDIT),
    "retained_share": Term(
        "rows retained",
        "Probability that a row of the distribution is itself retained; a removed row loses nothing.",
        _AUDIT,
    ),
    # The dual bound.
    "dual_bound": Term("upper bound", "No set within all caps could save more chunk tokens than this.", _CAPS),
    "dual_saved": Term("tokens saved", "What the chosen set saves."),
    "dual_gap": Term(
        "gap",
        "The bound less the tokens saved. It is no loss where removal stopped at the target by choice.",
        _CAPS,
    ),
    "k_max": Term("most chunks", "Most chunks that may go: m0 stay.", _SETTINGS),
    "price_t": Term("price of a chunk", "t: tokens that one more removed chunk costs in the bound.", _CAPS),
    "price": Term("price", "y: tokens that a unit of this head's and row's cap is worth in the bound.", _CAPS),
    # Decoding.
    "decode_largest": Term(
        "largest",
        "Largest attention that any head placed on the dropped chunks in a generated token's row.",
        _DECODING,
    ),
    "decode_mean": Term("mean", "The same, over all generated tokens read and all heads.", _DECODING),
    "decode_threshold": Term("threshold", "drift_threshold: above it a token counts as drifted.", _SETTINGS),
    "decode_first": Term("first above", "The first generated token whose row passed the threshold, from 1.", _SETTINGS),
    "decode_action": Term("action", "What was done then, as on_drift says.", _SETTINGS),
}
