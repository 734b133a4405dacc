"""What held a chunk that ranked among those to go: read off real records, against the caps themselves."""

import numpy as np
import pytest
import tiny
from tiny import LOOSE

from entroprefill_rag import LocalBackend
from entroprefill_rag.report.sources import sources_of
from entroprefill_rag.report.why import held_back


@pytest.fixture(scope="module")
def backend():
    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny", ledger=False) as made:
        yield made


def record(backend, **changed):
    config = LOOSE.model_copy(update={"min_saving": 0.0, **changed})
    return backend.generate(tiny.request(), config, max_new_tokens=2, do_sample=False).audit


def test_what_ranked_low_and_stayed_was_held_by_a_cap(backend):
    found = {}
    for cap in np.linspace(0.05, 0.6, 24):
        made = record(backend, eps_row=float(cap), target_saving=0.6, max_saving=0.9)
        if made.outcome != "pruned":
            continue
        trial, held = made.trial, held_back(made)
        assert not set(held) & set(trial.removed)
        order = np.argsort(trial.scores, kind="stable").tolist()
        for place, why in held.items():
            # Every chunk that ranks lower was tried before it: it went, or something held it too.
            assert set(order[: order.index(place)]) <= set(trial.removed) | set(held)
            mass = np.array(trial.row_max)[:, place]
            head = f"head {int(mass.argmax())} gives it {mass.max():.2f}"
            assert (head in why) == (mass.max() > cap)
        found |= held
        told = {source.number - 1: source.reason for source in sources_of(made) if source.status == "kept"}
        assert {place: why for place, why in told.items() if why} == held
    assert found, "no cap held anything: the test shows nothing"


def test_nothing_is_said_where_all_that_ranked_low_went_or_nothing_went(backend):
    free = record(backend, eps_row=1.0, target_saving=0.4)
    assert free.outcome == "pruned"
    assert held_back(free) == {}
    assert held_back(record(backend, enabled=False)) == {}
    assert held_back(record(backend, eps_row=0.001)) == {}


def test_a_record_with_settings_of_another_version_is_shown_without_reasons(backend):
    made = record(backend)
    assert made.outcome == "pruned"
    other = made.model_copy(update={"config": {**made.config, "of_a_later_version": 1}})
    assert held_back(other) == {}
    assert [source.status for source in sources_of(other)] == [source.status for source in sources_of(made)]
