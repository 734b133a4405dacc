"""Measured constants are the largest seen, cover every request that they were measured on, and say what they are."""

from __future__ import annotations

import pytest
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.diagnosis import MeasuredAssumptions, diagnose, measure_assumptions
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.stability import conditional_bound

STRICT = LOOSE.model_copy(update={"eps_row": 1e-9})
REQUESTS = [request(), request(7), request(4, 9)]


@pytest.fixture
def backend() -> LocalBackend:
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made


def test_constants_of_several_requests_bound_each_of_them(backend: LocalBackend) -> None:
    found = [diagnose(backend, asked, LOOSE) for asked in REQUESTS]
    measured = measure_assumptions(backend, REQUESTS, LOOSE)
    assert measured.requests == 3
    assert measured.skipped == 0
    assert measured.rows == sum(one.retained for one in found)
    assert measured.pruned_layers == (2,)
    for diameters in (False, True):
        bound = conditional_bound(measured.above(2, diameters=diameters), measured.eta)
        for one in found:
            assert all(bound.distance >= [layer.distance * (1 - 1e-5) for layer in one.layers])
            assert bound.logit_bound >= one.next_token.largest_change


def test_each_number_is_the_largest_seen(backend: LocalBackend) -> None:
    found = [diagnose(backend, asked, LOOSE) for asked in REQUESTS]
    measured = measure_assumptions(backend, REQUESTS, LOOSE)
    assert measured.eta == pytest.approx([max(column) for column in zip(*(one.eta for one in found), strict=True)])
    for index, layer in enumerate(measured.layers):
        seen = [one.layers[index] for one in found]
        assert layer.drift == pytest.approx(max(one.drift for one in seen))
        assert layer.token_map == pytest.approx(max(one.token_map for one in seen))
        assert layer.value_norm == pytest.approx(
            [max(column) for column in zip(*(one.value_norm for one in seen), strict=True)]
        )
        assert layer.requests == 3
        assert layer.rows == sum(one.retained for one in found)
        if layer.layer > 3:
            assert layer.lipschitz == pytest.approx(max(one.lipschitz for one in seen))
        else:
            assert layer.lipschitz is None
    assert measured.logit_lipschitz == pytest.approx(max(one.next_token.logit_lipschitz for one in found))


def test_they_are_labelled_and_json(backend: LocalBackend) -> None:
    measured = measure_assumptions(backend, REQUESTS[:1], LOOSE)
    assert measured.label == "estimate, not a guarantee"
    assert "estimate, not a guarantee" in repr(measured)
    assert MeasuredAssumptions.model_validate_json(measured.to_json()) == measured


def test_requests_that_are_not_pruned_are_counted_apart(backend: LocalBackend) -> None:
    measured = measure_assumptions(backend, REQUESTS, STRICT)
    assert (measured.requests, measured.skipped, measured.layers) == (0, 3, ())
    with pytest.raises(ConfigError, match="not all measured"):
        measured.above(2)


def test_layers_that_were_not_measured_have_no_bound(backend: LocalBackend) -> None:
    measured = measure_assumptions(backend, REQUESTS[:1], LOOSE, layer=3)
    assert measured.pruned_layers == (3,)
    assert len(measured.above(3).lipschitz) == 2
    with pytest.raises(ConfigError, match="not all measured"):
        measured.above(2)
