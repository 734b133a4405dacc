"""A record comes out again with its model, seed and configuration; not with another of any of them."""

from __future__ import annotations

import json

import pytest
import real_records
import tampering
import tiny

from entroprefill_rag import AuditRecord, LocalBackend
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.verify import check, replay

NAMES = (
    "pruned",
    "weighted_sampled",
    "sequential",
    "streak",
    "exact",
    "audit_failed",
    "drift_stop",
    "drift_restart",
    "profile",
    "no_mass",
    "off",
    "too_few_chunks",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_comes_out_again(name):
    assert replay(real_records.record_of(name), real_records.request(), real_records.backend()) == []


def test_a_pruning_without_an_answer_comes_out_again():
    record = real_records.backend().prune(real_records.request(), real_records.CONFIGS["pruned"]).audit
    assert not record.trials[-1].row_max
    assert replay(record, real_records.request(), real_records.backend()) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [(("config", "tau"), 0.2), (("config", "lam"), 9.0), (("trials", 0, "row_max", 0, 0), 0.9)],
)
def test_what_a_record_alone_cannot_show_a_replay_sees(place, value):
    lie = tampering.replaced(real_records.record_of("pruned").to_dict(), place, value)
    record = AuditRecord.from_json(json.dumps(lie))
    if place[0] == "config":
        assert check(record) == []
    assert replay(record, real_records.request(), real_records.backend())


def test_another_model_or_another_request_is_said_to_be_one():
    record = real_records.record_of("pruned")
    asked = real_records.request().model_copy(update={"query": "What else?"})
    assert [one.path for one in replay(record, asked, real_records.backend())] == ["prompt.hash"]
    with LocalBackend(tiny.model(seed=5), tiny.tokenizer(), name="tiny", ledger=False) as other:
        assert any(one.path.startswith("trials") for one in replay(record, real_records.request(), other))
    with LocalBackend(tiny.model(layers=7), tiny.tokenizer(), name="tiny", ledger=False) as deeper:
        assert "model.layers" in [one.path for one in replay(record, real_records.request(), deeper)]


def test_a_later_attempt_is_replayed_at_what_it_was_allowed_to_spend():
    config = real_records.loose(audit=real_records.audit(attempts="all", seed=None))
    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as counting:
        counting.generate(real_records.request(), config, max_new_tokens=2, do_sample=False)
        record = counting.generate(real_records.request(), config, max_new_tokens=2, do_sample=False).audit
    assert (record.audit.attempt, record.audit.delta) == (2, pytest.approx(0.05 / 6))
    assert check(record) == []
    assert replay(record, real_records.request(), real_records.backend()) == []


def test_draws_that_the_backend_has_seen_under_other_settings_are_not_replayed():
    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as counting:
        record = counting.generate(
            real_records.request(), real_records.loose(), max_new_tokens=2, do_sample=False
        ).audit
        assert replay(record, real_records.request(), counting) == []
        changed = tampering.replaced(record.to_dict(), ("config", "tau"), 0.5)
        found = replay(AuditRecord.from_json(json.dumps(changed)), real_records.request(), counting)
    assert [one.path for one in found] == ["audit.seed"]
    assert "void: audit reused" in found[0].rule


def test_a_callable_cannot_be_replayed_and_the_error_says_so():
    config = real_records.loose(head_weights=lambda entropy, eligible: eligible.astype(float))
    record = real_records.backend().generate(real_records.request(), config, max_new_tokens=2, do_sample=False).audit
    assert record.outcome == "pruned"
    assert check(record) == []
    with pytest.raises(ConfigError, match="callable"):
        replay(record, real_records.request(), real_records.backend())
