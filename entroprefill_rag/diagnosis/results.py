"""What a diagnosis and a measurement of the assumptions say: frozen, JSON in and out, and in words."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.stability import Assumptions

ESTIMATE = "estimate, not a guarantee"

# A bound this many times the margin says nothing of the greedy token, whatever the trivial cap.
_ORDERS = 100.0


class _Entry(BaseModel):
    # ser_json_inf_nan: bounds of deep models may be infinite, and JSON has no number for that.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def to_json(self, indent: int | None = None) -> str:
        """As JSON text."""
        return self.model_dump_json(indent=indent)

    def __str__(self) -> str:
        return repr(self)


class FixedRows(_Entry):
    """The fixed-row bound ``||o - o_R|| <= 2 V eta`` on the full run's own query, keys and values (section 8).

    Exact: it must hold up to rounding on every row of every head; a violation is a bug. Values are projected ones,
    ``W_O^h v``. Tightness is true change / bound, over rows that discard more than 1e-4.
    """

    rows: int = Field(description="Rows looked at: retained tokens times heads.")
    violations: int = Field(description="Rows on which it failed beyond rounding; must be 0.")
    tightest: float | None = Field(description="Largest true change / (2 V eta).")
    median: float | None = Field(description="Median true change / (2 V eta).")
    diameter_violations: int = Field(description="As `violations`, for eta times the value diameter; must be 0.")
    diameter_tightest: float | None = Field(description="Largest true change / (diameter * eta).")
    diameter_median: float | None = Field(description="Median true change / (diameter * eta).")


class MeasuredLayer(_Entry):
    """Constants of one layer above the pruned one, as seen; each an estimate, not a guarantee."""

    layer: int
    lipschitz: float | None = Field(
        description="(L) Largest ratio by which F_j^R stretched the largest distance between the two runs' retained "
        "states; None where they did not differ before this layer."
    )
    drift: float = Field(
        description="(D) Largest discarded mass of any retained row, less the same head's at the pruned layer; largest "
        "over heads."
    )
    eta: tuple[float, ...] = Field(description="Largest discarded mass of any retained row, chunk rows too, [H_Q].")
    eta_mean: float = Field(description="Mean discarded mass over heads and retained rows.")
    value_norm: tuple[float, ...] = Field(description="(V) Largest ||W_O^h v|| over retained and removed keys, [H_Q].")
    value_diameter: tuple[float, ...] = Field(
        description="Largest ||W_O^h (v_s - v_t)||, s retained, t removed, [H_Q]."
    )
    token_map: float | None = Field(
        description="(M) Largest ratio, over tokens, from a change of the attention module's output to the layer's; "
        "None where no token changed beyond rounding."
    )
    token_map_rows: int = Field(
        description="Retained rows that changed beyond rounding, which (M) was seen on; few in half precision."
    )
    requests: int = Field(description="Requests this was seen on.")
    rows: int = Field(description="Retained rows this was seen on.")


class MeasuredAssumptions(_Entry):
    """Measured constants of the conditional bound: largest values seen, for nothing that was not looked at."""

    label: Literal["estimate, not a guarantee"] = "estimate, not a guarantee"
    model: str
    requests: int = Field(description="Requests that were pruned and measured.")
    skipped: int = Field(description="Requests at which nothing was pruned.")
    rows: int = Field(description="Retained rows of all measured requests together.")
    pruned_layers: tuple[int, ...] = Field(description="Layers that were pruned at, ascending.")
    eta: tuple[float, ...] = Field(
        description="Largest discarded mass of any retained row at the pruned layer, chunk rows included, [H_Q]."
    )
    layers: tuple[MeasuredLayer, ...]
    logit_lipschitz: float | None = Field(
        description="C, for last states of norm at least `rho`; None where the head is no RMS norm and matrix."
    )
    rho: float | None = Field(description="Smallest norm of a last state, over both runs.")
    logit_cap: float | None = Field(description="Most that any logit can change, whatever happens below.")

    def above(self, layer: int, *, diameters: bool = False) -> Assumptions:
        """The constants of all layers above ``layer``, as :func:`~entroprefill_rag.rule.stability.conditional_bound`
        takes them.

        Args:
            layer: the last layer with all tokens.
            diameters: use value diameters where they are smaller than twice the norm.

        Raises:
            ConfigError: some layer above was not measured, or the head's constant is unknown.
        """
        chosen = [entry for entry in self.layers if entry.layer > layer]
        if not chosen or chosen[0].layer != layer + 1:
            raise ConfigError(
                f"layers above {layer} were not all measured (measured: {[entry.layer for entry in self.layers]}); "
                f"measure requests that are pruned at layer {layer} or below"
            )
        return assumptions_of(chosen, self.logit_lipschitz, self.logit_cap, diameters=diameters)

    def __repr__(self) -> str:
        return (
            f"MeasuredAssumptions({self.requests} requests, {self.rows} rows, pruned at {list(self.pruned_layers)}; "
            f"{ESTIMATE})"
        )


class LayerDiagnosis(MeasuredLayer):
    """One layer above the pruned one: how far the pruned run is from the full one, and what bounds say."""

    distance: float = Field(description="E_j: largest l2 distance of a retained token's states after this layer.")
    relative: float = Field(description="Largest distance of a token over the norm of its state in the full run.")
    last_distance: float = Field(description="Distance of the last token's states.")
    bound: float = Field(description="Conditional bound on E_j, constants of this very request, 2 V.")
    bound_diameter: float = Field(description="The same with value diameters in place of 2 V.")
    bound_token: float = Field(description="Recursion token by token with value diameters; largest over tokens.")
    last_bound_token: float = Field(description="Recursion token by token, at the last token.")
    fixed_rows: FixedRows

    @property
    def ratio(self) -> float | None:
        """Bound / true distance; None where there is no distance."""
        return self.bound / self.distance if self.distance else None

    @property
    def ratio_token(self) -> float | None:
        """Token-by-token bound / true distance."""
        return self.bound_token / self.distance if self.distance else None


class NextToken(_Entry):
    """What pruning did to the distribution of the first generated token, and what the bounds would have said."""

    divergence: float = Field(description="KL(full || pruned), nats.")
    top1_agrees: bool
    largest_change: float = Field(description="Largest change of a logit.")
    margin_full: float = Field(description="Top-1 minus top-2 logit, full run.")
    margin_pruned: float = Field(description="Likewise, pruned run.")
    logit_lipschitz: float | None = Field(description="C, local to this request's two last states.")
    logit_cap: float | None = Field(description="Most that any logit can change at all.")
    logit_bound: float | None = Field(description="C times the bound on E_{L-1}; None where C is unknown.")
    logit_bound_token: float | None = Field(description="C times the token-by-token bound at the last token.")
    proved: bool = Field(description="Whether a bound is strictly below half the larger margin.")

    @property
    def best_bound(self) -> float | None:
        """The smallest of the bounds on a logit's change, the trivial cap left out."""
        known = [bound for bound in (self.logit_bound, self.logit_bound_token) if bound is not None]
        return min(known) if known else None

    @property
    def vacuous(self) -> bool:
        """Whether the bounds say nothing: none is known, none is below the trivial cap, or all are orders too large.

        The last means at least a hundred times the larger margin.
        """
        best = self.best_bound
        if best is None or self.logit_cap is None or best >= self.logit_cap:
            return True
        return best >= _ORDERS * max(self.margin_full, self.margin_pruned)


class Diagnosis(_Entry):
    """The full and the pruned run of one request, side by side."""

    model: str
    prompt: str = Field(description="SHA-256 of the token ids.")
    tokens: int
    retained: int = Field(description="Tokens above the pruned layer.")
    layer: int | None = Field(description="The last layer with all tokens; None where nothing was pruned.")
    removed: tuple[str, ...] = Field(description="Ids of the removed chunks.")
    forced: bool = Field(description="The removal was asked for, not accepted by the rule.")
    reason: str = Field(description="The rule's verdict, or why nothing was pruned.")
    eta: tuple[float, ...] = Field(description="Largest discarded mass of any retained row at that layer, [H_Q].")
    layers: tuple[LayerDiagnosis, ...]
    next_token: NextToken | None

    @property
    def fixed_rows_hold(self) -> bool:
        """Whether the fixed-row bound held on every row looked at. It must: a violation is a bug."""
        return not any(one.fixed_rows.violations or one.fixed_rows.diameter_violations for one in self.layers)

    def rows(self) -> list[dict[str, Any]]:
        """One flat mapping per layer above the pruned one, for tables: heads by their largest, ratios beside bounds."""
        flat = []
        for one in self.layers:
            row = one.model_dump(exclude={"fixed_rows", "eta", "value_norm", "value_diameter", "requests"})
            row |= {
                "eta": max(one.eta),
                "value_norm": max(one.value_norm),
                "value_diameter": max(one.value_diameter),
                "ratio": one.ratio,
                "ratio_token": one.ratio_token,
                **{f"fixed_{name}": value for name, value in one.fixed_rows.model_dump().items()},
            }
            flat.append(row)
        return flat

    def words(self) -> tuple[str, ...]:
        """What this says, one sentence each."""
        from entroprefill_rag.diagnosis.words import sentences

        return sentences(self)

    def __repr__(self) -> str:
        if self.layer is None or self.next_token is None:
            return f"Diagnosis(nothing pruned: {self.reason})"
        last, token = self.layers[-1], self.next_token
        return (
            f"Diagnosis(layer {self.layer}, {self.retained} of {self.tokens} tokens, "
            f"distance {last.distance:.3g} <= {last.bound:.3g}, KL {token.divergence:.3g}, "
            f"top-1 {'same' if token.top1_agrees else 'changed'}{', bound vacuous' if token.vacuous else ''})"
        )


def assumptions_of(
    layers: list[MeasuredLayer], logit_lipschitz: float | None, logit_cap: float | None, *, diameters: bool
) -> Assumptions:
    """Measured layers as the assumptions of the bound; what was not seen to matter (None) counts as 0.

    Raises:
        ConfigError: the head's constant is unknown.
    """
    if logit_lipschitz is None:
        raise ConfigError("the constant of this model's head is unknown (no RMS norm and matrix): there is no bound")
    return Assumptions(
        lipschitz=np.array([entry.lipschitz or 0.0 for entry in layers]),
        drift=np.array([entry.drift for entry in layers]),
        value_norm=np.array([entry.value_norm for entry in layers]),
        token_map=np.array([entry.token_map or 0.0 for entry in layers]),
        logit_lipschitz=logit_lipschitz,
        value_diameter=np.array([entry.value_diameter for entry in layers]) if diameters else None,
        logit_cap=logit_cap,
    )
