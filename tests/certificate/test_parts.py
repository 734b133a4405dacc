"""Grid, losses, rows and the certificate itself."""

import itertools
import json

import pytest
from pydantic import ValidationError

from entroprefill_rag import AuditConfig, PruningConfig
from entroprefill_rag.certificate.grid import configurations, default_grid, read_grid, settings_of
from entroprefill_rag.certificate.losses import gold_lost
from entroprefill_rag.certificate.result import Certificate
from entroprefill_rag.certificate.rows import Row, Rows
from entroprefill_rag.certificate.run import check_levels
from entroprefill_rag.errors import CertificateError


def test_no_step_of_the_default_grid_asks_for_less_than_the_one_before():
    made = configurations(PruningConfig(), default_grid())
    for before, after in itertools.pairwise(made):
        assert before.eps_row <= after.eps_row
        assert before.target_saving <= after.target_saving
    assert all(config.audit.eps_audit == config.eps_row for config in made)


def test_changes_go_on_top_and_what_was_unset_stays_unset():
    base = PruningConfig(m0=3, audit=AuditConfig(delta=0.01))
    first = configurations(base, ({"eps_row": 0.1, "audit": {"eps_audit": 0.1}},))[0]
    assert (first.m0, first.eps_row, first.audit.delta, first.audit.eps_audit) == (3, 0.1, 0.01, 0.1)
    assert "mass_min" not in first.model_fields_set  # a profile fills it in
    assert PruningConfig.model_validate(settings_of(first)) == first


@pytest.mark.parametrize(
    ("base", "grid", "why"),
    [
        ({}, (), "empty"),
        ({}, ({"eps_row": 2.0},), "place 1 of the grid is no valid configuration: eps_row"),
        ({}, ({"target_saving": 0.05},), "no valid configuration: together"),
        ({}, ({"m0": 3}, {"nonsense": 1}), "place 2 of the grid is no valid configuration: nonsense"),
        ({}, ({"m0": 3}, {"m0": 3}), "place 2 of the grid is the same"),
        ({}, ({"enabled": False},), "enabled=false"),
        ({}, ({"overflow": "drop_last"},), "changes overflow"),
        ({"audit": {"attempts": "all"}}, ({},), "use 'each'"),
        ({"audit": {"seed": 3}}, ({},), "audit.seed=3"),
        ({"head_weights": lambda *_: None}, ({},), "a callable"),
    ],
)
def test_what_cannot_be_certified_is_refused(base, grid, why):
    with pytest.raises(CertificateError, match=why.replace("(", r"\(")):
        configurations(PruningConfig(**base), grid)


@pytest.mark.parametrize("text", ["{", "{}", "[]", "[1]", json.dumps([{}] * 65)])
def test_a_grid_file_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(CertificateError, match=r"g\.json"):
        read_grid(tmp_path / "g.json")


def test_gold_lost_is_a_share_or_all_or_nothing():
    assert gold_lost({"a", "x"}, ("a", "b"), any_is_enough=False) == 0.5
    assert gold_lost({"a", "x"}, ("a", "b"), any_is_enough=True) == 0.0
    assert gold_lost({"a", "b"}, ("a", "b"), any_is_enough=True) == 1.0
    assert gold_lost((), ("a",), any_is_enough=False) == 0.0


def row(at, stamp="s", loss=0.0):
    return Row(stamp=stamp, place=0, request=at, outcome="pruned", loss=loss, saved=1, full=2)


def test_rows_go_on_after_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "rows.jsonl"
    first = Rows("s", file)
    first.add(row(0))
    first.add(row(1))
    file.write_text(file.read_text()[:-9])
    again = Rows("s", file)
    assert again.get(0, 0) == row(0)
    assert again.get(0, 1) is None
    again.add(row(1, loss=0.5))
    assert Rows("s", file).get(0, 1).loss == 0.5
    assert Rows("other", file).get(0, 0) is None


def test_a_file_that_holds_something_else_is_left_alone(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("my notes\nend")
    with pytest.raises(CertificateError, match="line 1 of"):
        Rows("s", file)
    file.write_text("my only note")
    with pytest.raises(CertificateError, match="line 1 of"):
        Rows("s", file)
    assert file.read_text() == "my only note"


def certificate(**changes):
    seen = {"mean_loss": 0.0, "total_loss": 0.0, "pruned": 9, "saved_work": 0.2}
    grid = [
        {"changes": {"m0": 2}, "measured": {**seen, "p_value": 0.01}, "certified": True},
        {"changes": {"m0": 3}, "measured": {**seen, "saved_work": 0.1, "p_value": 0.02}, "certified": True},
        {"changes": {"m0": 4}, "measured": {**seen, "saved_work": 0.4, "p_value": 0.3}},
        {"changes": {"m0": 5}},
    ]
    data = {
        "created": "2025-01-01T00:00:00+00:00",
        "model": "tiny",
        "fingerprint": "f",
        "dtype": "float32",
        "profile": None,
        "loss": "gold_lost",
        "alpha": 0.1,
        "delta": 0.05,
        "requests": {"n": 40, "digest": "0"},
        "base": {},
        "grid": grid,
        "certified": 2,
        "chosen": 0,
        "config": {"m0": 2},
        "claim": {},
    }
    return Certificate.model_validate({**data, **changes})


def test_a_profile_takes_no_certificate_of_another_one():
    from profile_cases import profile

    from entroprefill_rag.errors import ProfileError

    mine = certificate(profile=profile().name)
    assert profile().with_certificate(mine).certificates == (mine,)
    with pytest.raises(ProfileError, match="measured with profile none"):
        profile().with_certificate(certificate())


def test_a_certificate_round_trips(tmp_path):
    made = certificate()
    (tmp_path / "c.json").write_text(made.to_json())
    assert Certificate.read(tmp_path / "c.json") == made
    assert made.pruning_config() == PruningConfig(m0=2)


@pytest.mark.parametrize(
    "changes",
    [{"certified": 3}, {"chosen": 1}, {"chosen": 2}, {"chosen": None}, {"config": None}, {"delta": 0.015}],
)
def test_a_certificate_that_contradicts_itself_is_refused(changes):
    with pytest.raises(ValidationError):
        certificate(**changes)


def test_a_file_that_is_no_certificate_is_refused(tmp_path):
    (tmp_path / "c.json").write_text('{"version": "1"}')
    with pytest.raises(CertificateError, match="is no certificate of version 1: created"):
        Certificate.read(tmp_path / "c.json")
    with pytest.raises(CertificateError, match="cannot be read"):
        Certificate.read(tmp_path / "missing.json")


def test_too_few_requests_are_told_with_what_they_could_show():
    check_levels(29, 0.1, 0.05)
    with pytest.raises(CertificateError, match=r"26 requests can certify nothing below alpha = 0\.1089.*takes 29"):
        check_levels(26, 0.1, 0.05)
    for alpha, delta in ((0.0, 0.05), (1.0, 0.05), (0.1, 0.0), (0.1, 1.0), (float("nan"), 0.05)):
        with pytest.raises(CertificateError, match="between 0 and 1"):
            check_levels(100, alpha, delta)
