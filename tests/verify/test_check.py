"""A real record follows from itself; changed in any one place it does not, unless that place is a known limit."""

from __future__ import annotations

import functools
import json
import re

import pytest
import real_records
import tampering
from real_records import CONFIGS, record_of

from entroprefill_rag.errors import RecordError
from entroprefill_rag.record import AuditRecord
from entroprefill_rag.verify import LIMITS, check

# The same caps, written in another way.
SAME = {("config.eps_row", "last twice")}
QUICK = ("off", "too_few_chunks", "no_mass")


def as_cases(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def undetected(name):
    """Changes of a record that the check lets pass, as (path, what was done)."""
    record = record_of(name)
    passed = []
    for path, how, data in tampering.tampered(record.to_dict()):
        try:
            changed = AuditRecord.from_json(json.dumps(data))
        except RecordError:
            continue
        if changed != record and (path, how) not in SAME and not check(changed):
            passed.append((path, how))
    return passed


@pytest.mark.parametrize("name", CONFIGS)
def test_a_real_record_follows_from_itself(name):
    record = record_of(name)
    assert check(record) == []
    assert check(AuditRecord.from_json(record.to_json())) == []


def test_the_records_go_every_way_that_a_run_can_go():
    records = [record_of(name) for name in CONFIGS]
    verdicts = {trial.verdict.code for record in records for trial in record.trials}
    assert verdicts >= {"accepted", "streak", "audit_failed", "caps_leave_nothing", "below_min_saving"}
    assert verdicts >= {"no_document_mass", "no_eligible_heads"}
    audits = [audit for record in records for trial in record.trials for audit in trial.audits]
    assert {audit.bound for audit in audits} == {"exact", "betting", "hoeffding", "kl", "empirical_bernstein"}
    assert {audit.ended for audit in audits} >= {None, "passed"}


@pytest.mark.parametrize("name", as_cases(CONFIGS))
def test_no_single_place_can_be_changed_unseen_but_those_that_are_said_to_be(name):
    record = record_of(name)
    known = [limit for limit in LIMITS if limit.where(record)]
    unseen = [(path, how) for path, how in undetected(name) if not any(limit.covers(path) for limit in known)]
    assert unseen == []


@pytest.mark.slow
def test_every_place_said_to_be_unknowable_is():
    """The list may not grow stale: each of its patterns covers a change that really goes unseen."""
    needed = {
        pattern
        for name in CONFIGS
        for limit in LIMITS
        if limit.where(record_of(name))
        for pattern in limit.paths
        if any(re.fullmatch(pattern, path) for path, _ in undetected(name))
    }
    assert [pattern for limit in LIMITS for pattern in limit.paths if pattern not in needed] == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("audit", "seed"), 12),
        (("audit", "delta"), 0.01),
        (("prompt", "hash"), "0" * 64),
        (("trials", 0, "audits", 1, "level"), 0.2),
        (("trials", 0, "audits", 1, "passed", 0), False),
        (("trials", 0, "max_discarded"), 0.01),
        (("claims", "probabilistic"), "The output is unchanged."),
        (("tokens_removed",), 10_000),
    ],
)
def test_a_lie_about_what_is_claimed_is_found_where_it_stands(place, value):
    lie = tampering.replaced(record_of("pruned").to_dict(), place, value)
    found = check(AuditRecord.from_json(json.dumps(lie)))
    stem = tampering.path_of(place)
    # The hash is seen in the draws that it no longer gives.
    assert any(one.path.startswith("audit.observers" if stem == "prompt.hash" else stem) for one in found)
    assert all(one.rule for one in found)


def test_numbers_out_of_all_bounds_are_findings_and_no_error():
    data = record_of("pruned").to_dict()
    for place, value in (
        (("config", "eps_row"), 7.0),
        (("config",), {}),
        (("model", "kv_heads"), 0),
        (("model", "query_heads"), 10**6),
        (("prompt", "suffix"), [-1, -5]),
        (("trials", 0, "removed"), [99]),
        (("trials", 0, "head_weights"), [-1.0] * 4),
        (("trials", 0, "audits", 1, "level"), 2.0),
        (("audit", "seed"), -1),
        (("audit", "monitored_layers"), 0),
    ):
        lie = tampering.replaced(data, place, value)
        assert check(AuditRecord.from_json(json.dumps(lie))), place


def test_the_rounding_of_a_record_is_no_finding():
    data = record_of("pruned").to_dict()
    data["trials"][0]["pooled_discarded"] *= 1 + 4e-9
    data["trials"][0]["cap_slack"] += 4e-10
    assert check(AuditRecord.from_json(json.dumps(data))) == []


def test_a_prune_for_another_model_follows_too():
    import tiny

    record = real_records.backend().prune(tiny.request(), CONFIGS["pruned"]).audit
    assert record.outcome == "pruned"
    assert check(record) == []
