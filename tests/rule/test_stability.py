"""The envelope and the row bound are attained; the conditional bound holds under its assumptions, and only there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from entroprefill_rag.rule.stability import (
    Assumptions,
    conditional_bound,
    envelope,
    envelope_per_head,
    fixed_row_bound,
    local_head_lipschitz,
    token_bound,
    trivial_logit_cap,
    value_diameter,
)

Floats = NDArray[np.float64]

# --- envelope -------------------------------------------------------------------------------------------------------


def pooled(discarded: Floats, weights: Floats, groups: int) -> float:
    """q(D) from d[h, a] and head weights, as section 3 pools."""
    return float((weights * discarded.mean(axis=1)).sum() / groups)


def test_the_envelope_is_attained_by_one_row_of_a_head_at_the_floor() -> None:
    heads, groups, rows, zeta = 6, 2, 4, 0.2
    per_group = heads // groups
    weights = np.tile([1 - zeta + zeta / per_group] + [zeta / per_group] * (per_group - 1), groups)
    discarded = np.zeros((heads, rows))
    discarded[4, 2] = 0.37
    q = pooled(discarded, weights, groups)

    assert envelope(q, rows=rows, query_heads=heads, zeta=zeta) == pytest.approx(0.37)
    assert envelope_per_head(q, rows=rows, groups=groups, weights=weights)[4] == pytest.approx(0.37)


@given(data=st.data(), groups=st.integers(1, 3), per_group=st.integers(1, 4), rows=st.integers(1, 6))
def test_no_head_of_any_row_is_above_its_envelope(data: st.DataObject, groups: int, per_group: int, rows: int) -> None:
    zeta = data.draw(st.floats(0.01, 1.0))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    heads = groups * per_group
    weights = np.concatenate(
        [(1 - zeta) * rng.dirichlet(np.full(per_group, 0.3)) + zeta / per_group for _ in range(groups)]
    )
    discarded = rng.beta(0.3, 0.6, (heads, rows))
    q = pooled(discarded, weights, groups)

    per_head = envelope_per_head(q, rows=rows, groups=groups, weights=weights)
    assert (discarded.max(axis=1) <= per_head + 1e-12).all()
    assert per_head.max() <= envelope(q, rows=rows, query_heads=heads, zeta=zeta) + 1e-12


def test_a_mean_instead_of_the_envelope_would_not_hold() -> None:
    discarded = np.zeros((2, 4))
    discarded[0, 0] = 0.5
    assert pooled(discarded, np.full(2, 0.5), 1) < 0.5


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"query_heads": 0}, {"zeta": 0.0}, {"zeta": 1.1}])
def test_an_envelope_without_rows_heads_or_floor_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="envelope needs"):
        envelope(0.1, **{"rows": 4, "query_heads": 4, "zeta": 0.1, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="envelope needs"):
        envelope(math.nan, rows=4, query_heads=4, zeta=0.1)
    with pytest.raises(ValueError, match="envelope needs"):
        envelope_per_head(0.1, rows=4, groups=1, weights=[0.0, 1.0])


# --- one attention row ----------------------------------------------------------------------------------------------


def row_change(weights: Floats, values: Floats, kept: NDArray[np.bool_]) -> float:
    """||o - o_R||, the weights renormalised on the kept keys."""
    full = weights @ values
    pruned = (weights[kept] / weights[kept].sum()) @ values[kept]
    return float(np.linalg.norm(full - pruned))


@pytest.mark.parametrize("eta", [0.01, 0.5, 0.9])
def test_two_opposite_values_attain_the_factor_of_two(eta: float) -> None:
    values = np.array([[3.0, 4.0], [-3.0, -4.0]])
    change = row_change(np.array([1 - eta, eta]), values, np.array([True, False]))
    diameter = value_diameter(torch.tensor(values[:1]), torch.tensor(values[1:]))
    assert fixed_row_bound(eta, 5.0) == pytest.approx(change)
    assert eta * diameter == pytest.approx(change)


@given(seed=st.integers(0, 2**32), keys=st.integers(2, 12))
def test_a_row_never_moves_further_than_its_bounds(seed: int, keys: int) -> None:
    rng = np.random.default_rng(seed)
    weights, values = rng.dirichlet(np.full(keys, 0.4)), rng.normal(size=(keys, 3)) + rng.normal(size=3) * 5
    kept = np.zeros(keys, dtype=bool)
    kept[rng.permutation(keys)[: rng.integers(1, keys)]] = True
    if weights[kept].sum() < 1e-9:
        return
    eta = float(weights[~kept].sum())
    largest = float(np.linalg.norm(values, axis=1).max())
    sharper = eta * value_diameter(torch.from_numpy(values[kept]), torch.from_numpy(values[~kept]))
    assert row_change(weights, values, kept) <= sharper + 1e-12
    assert sharper <= fixed_row_bound(eta, largest) + 1e-9


def test_values_far_from_the_origin_but_close_together_hardly_move_a_row() -> None:
    values = torch.tensor([[1e6, 0.0], [1e6, 1e-3]])
    assert value_diameter(values[:1], values[1:]) == pytest.approx(1e-3, rel=1e-2)
    assert value_diameter(values, values[:0]) == 0.0


# --- the head of the model ------------------------------------------------------------------------------------------


def rms_norm(state: Floats, gamma: Floats, norm_eps: float) -> Floats:
    return np.asarray(gamma * state / np.sqrt((state**2).mean() + norm_eps))


@given(seed=st.integers(0, 2**32), norm_eps=st.sampled_from([0.0, 1e-6, 0.3]), rho=st.floats(0.05, 20.0))
def test_logits_move_no_further_than_the_head_constant_allows(seed: int, norm_eps: float, rho: float) -> None:
    rng = np.random.default_rng(seed)
    hidden = 5
    gamma, unembedding = rng.normal(size=hidden), rng.normal(size=(11, hidden))
    directions = rng.normal(size=(2, hidden))
    if rng.random() < 0.5:
        directions[1] = directions[0] + rng.normal(size=hidden) * 10.0 ** rng.uniform(-6, 0)
    states = directions / np.linalg.norm(directions, axis=1, keepdims=True) * (rho * (1 + rng.exponential(1, (2, 1))))
    norms = {"unembedding_norm": float(np.linalg.norm(unembedding, axis=1).max()), "gamma_max": np.abs(gamma).max()}

    moved = np.abs(unembedding @ (rms_norm(states[0], gamma, norm_eps) - rms_norm(states[1], gamma, norm_eps))).max()

    constant = local_head_lipschitz(**norms, rho=rho, hidden=hidden, norm_eps=norm_eps)
    assert moved <= constant * np.linalg.norm(states[0] - states[1]) * (1 + 1e-6) + 1e-12
    assert moved <= trivial_logit_cap(**norms, hidden=hidden) + 1e-12


def test_the_head_constant_is_attained_across_the_sphere() -> None:
    """Two states of the least norm, a hair apart: nothing smaller would do."""
    rho, hidden = 2.0, 4
    first, second = rho * np.array([1.0, 0, 0, 0]), rho * np.array([math.cos(1e-4), math.sin(1e-4), 0, 0])
    moved = abs((rms_norm(first, np.ones(4), 0.1) - rms_norm(second, np.ones(4), 0.1))[1])
    constant = local_head_lipschitz(unembedding_norm=1.0, gamma_max=1.0, rho=rho, hidden=hidden, norm_eps=0.1)
    assert moved == pytest.approx(constant * np.linalg.norm(first - second), rel=1e-6)


def test_a_head_constant_needs_a_norm_to_divide_by() -> None:
    with pytest.raises(ValueError, match="rho"):
        local_head_lipschitz(unembedding_norm=1.0, gamma_max=1.0, rho=0.0, hidden=4, norm_eps=0.0)


# --- the conditional bound ------------------------------------------------------------------------------------------


def assumptions(**changes: object) -> Assumptions:
    numbers: dict[str, object] = {
        "lipschitz": np.array([2.0, 3.0]),
        "drift": np.array([0.1, 0.9]),
        "value_norm": np.array([[1.0, 2.0], [0.5, 4.0]]),
        "token_map": np.array([1.5, 2.0]),
        "logit_lipschitz": 0.5,
    }
    return Assumptions(**{**numbers, **changes})  # type: ignore[arg-type]


def test_the_recursion_is_the_one_computed_by_hand() -> None:
    bound = conditional_bound(assumptions(), [0.1, 0.3])

    # Layer 1: eta (.2, .4); beta = 2 * 1.5 * (1 * .2 + 2 * .4) = 3. Layer 2: eta (1, 1), the second clipped;
    # beta = 2 * 2 * (.5 + 4) = 18. E = 3, then 3 * 3 + 18 = 27; logits 13.5.
    assert bound.eta.ravel().tolist() == pytest.approx([0.2, 0.4, 1.0, 1.0])
    assert bound.beta.tolist() == pytest.approx([3.0, 18.0])
    assert bound.distance.tolist() == pytest.approx([3.0, 27.0])
    assert bound.contribution.tolist() == pytest.approx([9.0, 18.0])
    assert bound.logit_bound == pytest.approx(13.5)
    assert not bound.vacuous
    assert bound.greedy_unchanged is None


def test_value_diameters_are_used_where_they_are_smaller_than_twice_the_norm() -> None:
    diameters = np.array([[0.5, 9.0], [0.1, 0.1]])
    bound = conditional_bound(assumptions(value_diameter=diameters), [0.1, 0.3])
    assert bound.beta.tolist() == pytest.approx([1.5 * (0.5 * 0.2 + 4.0 * 0.4), 2.0 * (0.1 + 0.1)])


def test_the_greedy_token_is_proved_only_by_a_margin_strictly_above_twice_the_bound() -> None:
    verdicts = [conditional_bound(assumptions(), [0.1, 0.3], margin=margin).greedy_unchanged for margin in (27.0, 27.1)]
    assert verdicts == [False, True]


def test_a_trivial_cap_below_the_bound_makes_it_vacuous() -> None:
    bound = conditional_bound(assumptions(logit_cap=8.0), [0.1, 0.3], margin=17.0)
    assert bound.vacuous
    assert bound.logit_bound == 8.0
    assert bound.greedy_unchanged, "a cap is a bound all the same"
    assert not conditional_bound(assumptions(logit_cap=14.0), [0.1, 0.3]).vacuous


def test_nothing_discarded_moves_nothing() -> None:
    bound = conditional_bound(assumptions(drift=np.zeros(2)), [0.0, 0.0], margin=1e-9)
    assert bound.logit_bound == 0.0
    assert bound.greedy_unchanged


def test_constants_that_explode_give_an_infinite_bound_and_no_proof() -> None:
    huge = assumptions(
        lipschitz=np.full(400, 1e10), drift=np.zeros(400), value_norm=np.ones((400, 1)), token_map=np.ones(400)
    )
    bound = conditional_bound(huge, [0.1], margin=1e300)
    assert bound.logit_bound == math.inf
    assert bound.vacuous
    assert bound.greedy_unchanged is False


@given(data=st.data(), layers=st.integers(1, 6), heads=st.integers(1, 4))
def test_contributions_sum_to_the_last_distance(data: st.DataObject, layers: int, heads: int) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    made = Assumptions(
        lipschitz=rng.uniform(0, 3, layers) * (rng.random(layers) < 0.8),
        drift=rng.uniform(-0.2, 0.5, layers),
        value_norm=rng.uniform(0, 2, (layers, heads)),
        token_map=rng.uniform(0, 2, layers),
        logit_lipschitz=1.0,
    )
    bound = conditional_bound(made, rng.uniform(0, 1, heads))
    assert bound.contribution.sum() == pytest.approx(bound.distance[-1])
    assert bound.logit_bound == pytest.approx(bound.distance[-1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"lipschitz": np.ones(3)},
        {"drift": np.ones(1)},
        {"value_norm": np.ones((2, 3))},
        {"value_diameter": np.ones((2, 3))},
        {"token_map": np.array([1.0, np.nan])},
        {"lipschitz": np.array([1.0, np.inf])},
        {"token_map": np.array([1.0, -1.0])},
        {"logit_lipschitz": -1.0},
    ],
)
def test_constants_that_do_not_fit_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        conditional_bound(assumptions(**wrong), [0.1, 0.3])


# --- token by token -------------------------------------------------------------------------------------------------


def test_the_recursion_token_by_token_is_the_one_computed_by_hand() -> None:
    stretch = [[9.0, 9.0, 9.0], [2.0, 3.0, 0.5]]
    added = [[1.0, 0.0, 4.0], [0.0, 1.0, 0.5]]
    # Nothing moved before the first layer, so its stretch does not count. Then the largest of the tokens up to each one
    # is (1, 1, 4): 2 * 1, 3 * 1 + 1, .5 * 4 + .5.
    assert token_bound(stretch, added).tolist() == [[1.0, 0.0, 4.0], [2.0, 4.0, 2.5]]


def test_a_token_is_not_moved_by_a_later_one() -> None:
    distance = token_bound(np.ones((2, 3)), [[0.0, 0.0, 5.0], [0.0, 0.0, 0.0]])
    assert distance[-1].tolist() == [0.0, 0.0, 5.0]


@given(data=st.data(), layers=st.integers(1, 5), tokens=st.integers(1, 6))
def test_token_by_token_is_never_looser_and_attained_where_tokens_are_alike(
    data: st.DataObject, layers: int, tokens: int
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    stretch, added = rng.uniform(0, 3, (layers, tokens)), rng.uniform(0, 2, (layers, tokens))
    largest = 0.0
    for by, plus, distance in zip(stretch, added, token_bound(stretch, added), strict=True):
        largest = by.max() * largest + plus.max()
        assert distance.max() <= largest * (1 + 1e-12)
    alike = token_bound(np.tile(stretch[:, :1], tokens), np.tile(added[:, :1], tokens))
    one = assumptions(
        lipschitz=stretch[:, 0],
        drift=np.zeros(layers),
        value_norm=0.5 * added[:, :1],
        token_map=np.ones(layers),
    )
    assert alike == pytest.approx(np.tile(conditional_bound(one, [1.0]).distance[:, None], tokens))


def test_token_by_token_constants_that_do_not_fit_are_refused() -> None:
    for stretch, added in (
        (np.ones((2, 3)), np.ones((2, 2))),
        (np.ones(3), np.ones(3)),
        (np.full((1, 2), np.nan), np.ones((1, 2))),
        (np.ones((1, 2)), -np.ones((1, 2))),
    ):
        with pytest.raises(ValueError, match="must"):
            token_bound(stretch, added)


def test_token_by_token_explodes_to_infinity_and_not_to_nan() -> None:
    distance = token_bound(np.full((400, 2), 1e10), np.ones((400, 2)))
    assert (distance[-1] == math.inf).all()


# --- a network small enough to measure every assumption -------------------------------------------------------------


class Layer:
    """Causal attention with residual, then x + tanh(x W): pre-norm left out, so that every constant is known."""

    def __init__(self, rng: np.random.Generator, width: int, heads: int) -> None:
        size = width // heads
        self.query, self.key = rng.normal(size=(2, heads, width, size)) * 0.8
        self.value = rng.normal(size=(heads, width, size)) * 0.3
        self.out = rng.normal(size=(heads, size, width)) * 0.3
        self.mlp = rng.normal(size=(width, width)) * 0.15
        self.token_map = 1 + float(np.linalg.norm(self.mlp, 2))

    def attention(self, states: Floats) -> Floats:
        """[heads, n, n] probabilities."""
        scores = np.einsum("nd,hde,mf,hfe->hnm", states, self.query, states, self.key)
        scores = np.where(np.tri(len(states), dtype=bool), scores, -np.inf)
        probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(probabilities / probabilities.sum(axis=-1, keepdims=True))

    def values(self, states: Floats) -> Floats:
        """[heads, n, width], W_O applied."""
        return np.einsum("nd,hde,hef->hnf", states, self.value, self.out)

    def __call__(self, states: Floats) -> Floats:
        mixed = states + np.einsum("hnm,hmd->nd", self.attention(states), self.values(states))
        return np.asarray(mixed + np.tanh(mixed @ self.mlp))


def largest_distance(first: Floats, second: Floats) -> float:
    return float(np.linalg.norm(first - second, axis=1).max())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sharp", [False, True])
def test_the_bound_holds_where_every_assumption_was_measured(seed: int, sharp: bool) -> None:
    rng = np.random.default_rng(seed)
    width, heads, n, depth = 8, 2, 14, 4
    layers = [Layer(rng, width, heads) for _ in range(depth)]
    kept = np.array([i for i in range(n) if not 4 <= i < 8])
    removed = np.arange(4, 8)

    full = layers[0](rng.normal(size=(n, width)))
    eta = layers[0].attention(full)[:, kept][:, :, removed].sum(axis=-1).max(axis=1)
    pruned = full[kept]
    numbers: dict[str, list[object]] = {name: [] for name in ("lipschitz", "drift", "norm", "diameter", "map", "true")}
    for layer in layers[1:]:
        discarded = layer.attention(full)[:, kept][:, :, removed].sum(axis=-1).max(axis=1)
        values = layer.values(full)
        before, through_pruned = largest_distance(full[kept], pruned), layer(full[kept])
        full, pruned = layer(full), layer(pruned)
        numbers["lipschitz"].append(largest_distance(through_pruned, pruned) / before if before else 1.0)
        numbers["drift"].append((discarded - eta).max())
        numbers["norm"].append(np.linalg.norm(values, axis=-1).max(axis=1))
        pairs = [(torch.from_numpy(head[kept]), torch.from_numpy(head[removed])) for head in values]
        numbers["diameter"].append([value_diameter(*pair) for pair in pairs])
        numbers["map"].append(layer.token_map)
        numbers["true"].append(largest_distance(full[kept], pruned))

    measured = Assumptions(
        lipschitz=np.array(numbers["lipschitz"]),
        drift=np.array(numbers["drift"]),
        value_norm=np.array(numbers["norm"]),
        token_map=np.array(numbers["map"]),
        logit_lipschitz=1.0,
        value_diameter=np.array(numbers["diameter"]) if sharp else None,
    )
    true = np.array(numbers["true"], dtype=np.float64)
    assert true.min() > 1e-3, "pruning changed nothing, so nothing is tested"
    assert (true <= conditional_bound(measured, eta).distance + 1e-9).all()


# --- Prop. 6.1: no bound without assumptions ------------------------------------------------------------------------


def two_layers(prompt: Floats, kept: list[int], strength: float) -> tuple[Floats, float]:
    """A two-layer attention network; layer 1 sees every token, layer 2 the kept ones. Softmax attention, residual.

    Features of a token: [constant, topic, needle, answer]. Layer 1 attends by topic and moves nothing but topic.
    Layer 2 attends by needle: a token with a needle of 1 outweighs the others by e^30; its value is its needle times
    `strength`, written into the answer.

    Returns:
        Attention of layer 1, ``[n, n]``, and the answer at the last token.
    """

    def attend(states: Floats, score: Floats, value: Floats) -> tuple[Floats, Floats]:
        scores = states @ score @ states.T
        scores = np.where(np.tri(len(states), dtype=bool), scores, -np.inf)
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return probabilities, states + probabilities @ (states @ value)

    by_topic, move_topic = np.zeros((4, 4)), np.zeros((4, 4))
    by_topic[1, 1], move_topic[1, 1] = 4.0, 0.5
    by_needle, write_answer = np.zeros((4, 4)), np.zeros((4, 4))
    by_needle[0, 2], write_answer[2, 3] = 30.0, strength

    shallow, states = attend(prompt, by_topic, move_topic)
    _, states = attend(states[kept], by_needle, write_answer)
    return shallow, float(states[-1, 3])


@pytest.mark.parametrize("wanted", [0.5, 10.0, 1e6])
def test_alike_at_the_shallow_layer_and_as_different_as_wanted_at_the_end(wanted: float) -> None:
    """Prop. 6.1: same shallow attention, same chunk dropped; one prompt loses nothing, the other everything."""
    #                 constant topic needle answer
    plain = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    needle = plain.copy()
    needle[2, 2] = 1.0
    everything, without_chunk = [0, 1, 2, 3], [0, 1, 3]
    strength = wanted

    shallow_plain, full_plain = two_layers(plain, everything, strength)
    shallow_needle, full_needle = two_layers(needle, everything, strength)
    _, pruned_plain = two_layers(plain, without_chunk, strength)
    _, pruned_needle = two_layers(needle, without_chunk, strength)

    assert (shallow_plain == shallow_needle).all(), "whatever reads the shallow layer decides alike"
    assert shallow_plain[3, 2] < 1e-3, "and would call this chunk safe to remove"
    assert pruned_plain == pruned_needle, "after removal the prompts are the same"
    assert full_plain == pruned_plain, "here removal was free"
    assert abs(full_needle - pruned_needle) == pytest.approx(wanted, rel=1e-6), "and here it cost any wanted amount"


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_the_conditional_bound_rests_on_the_drift_it_assumes(drift: float) -> None:
    """On the pair of Prop. 6.1: without drift the bound is refuted, with the true one it is attained."""
    needle = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, -1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    shallow, full = two_layers(needle, [0, 1, 2, 3], 5.0)
    _, pruned = two_layers(needle, [0, 1, 3], 5.0)
    # Residual only above attention, so M = 1; values are 5 at the needle and 0 elsewhere.
    one = Assumptions(
        lipschitz=np.ones(1),
        drift=np.array([drift]),
        value_norm=np.array([[5.0]]),
        token_map=np.ones(1),
        logit_lipschitz=1.0,
        value_diameter=np.array([[5.0]]),
    )
    bound = conditional_bound(one, [shallow[[0, 1, 3], 2].max()]).distance[-1]
    if drift:
        assert bound == pytest.approx(abs(full - pruned), rel=1e-6)
    else:
        assert bound < 0.01 * abs(full - pruned)
