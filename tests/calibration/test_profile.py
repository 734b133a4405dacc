"""A profile: what it refuses, how it enters a configuration, and what a run and its record make of it."""

import json

import numpy as np
import pytest
import torch
from profile_cases import profile
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import LocalBackend, PruningConfig
from entroprefill_rag.calibration.profile import ModelProfile, settle, shipped
from entroprefill_rag.config import HeadProfile
from entroprefill_rag.engine.families import fingerprint
from entroprefill_rag.errors import ProfileError
from entroprefill_rag.verify.check import check

ABLE = tuple(range(1, 5))


@pytest.fixture(scope="module")
def tiny():
    return model(), tokenizer()


def fitting(tiny, **more):
    """A profile of the tiny model that picks its first head at layers 2 and 3."""
    made, words = tiny
    config = made.config
    heads = config.num_attention_heads
    v = (1.0, *(0.0,) * (heads - 1))
    return profile(
        depth=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=config.num_key_value_heads,
        fingerprints=(fingerprint(made, words),),
        layers=(2, 3),
        weights=((2, v), (3, v)),
        **more,
    )


def test_auto_without_a_profile_is_what_the_paper_does():
    assert settle(PruningConfig(), None, ABLE).head_weights == "renyi"


def test_a_profile_gives_layers_and_thresholds_that_the_caller_left_open():
    found = settle(PruningConfig(), profile(), ABLE)
    assert (found.layers, found.mass_min, found.mu_min) == ((2, 3), 0.07, 0.02)
    assert isinstance(found.head_weights, HeadProfile)
    assert [layer for layer, _ in found.head_weights.weights] == [2, 3]
    given = PruningConfig(layers=(3, 4), mass_min=0.5, mu_min=0.05)
    kept = settle(given, profile(), ABLE)
    assert (kept.layers, kept.mass_min, kept.mu_min) == ((3, 4), 0.5, 0.05)
    assert [layer for layer, _ in kept.head_weights.weights] == [3]


def test_layers_that_the_caller_names_keep_the_limits_that_reject_sink_only_layers():
    usual = PruningConfig()
    found = settle(PruningConfig(layers=(3, 4)), profile(), ABLE)
    assert (found.layers, found.mass_min, found.mu_min) == ((3, 4), usual.mass_min, usual.mu_min)
    assert isinstance(found.head_weights, HeadProfile)


def test_a_profile_never_touches_caps_or_audit():
    found = settle(PruningConfig(), profile(), ABLE)
    assert (found.eps_row, found.rho, found.audit) == (
        PruningConfig().eps_row,
        None,
        PruningConfig().audit,
    )


@pytest.mark.parametrize("kind", ["renyi", "uniform", lambda h, e: e])
def test_a_named_weighting_leaves_the_profile_out_altogether(kind):
    config = PruningConfig(head_weights=kind)
    assert settle(config, profile(), ABLE) is config


def test_asking_for_a_profile_that_is_not_there_says_how_to_make_one():
    with pytest.raises(ProfileError, match="entroprefill calibrate"):
        settle(PruningConfig(head_weights="profile"), None, ABLE)


def test_where_no_layer_of_the_profile_sees_the_documents_the_paper_s_weights_are_used():
    found = settle(PruningConfig(), profile(), (1, 4))
    assert (found.head_weights, found.layers) == ("renyi", "auto")


def test_json_and_back_is_the_same_profile(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(profile().to_json(), encoding="utf-8")
    assert ModelProfile.read(file) == profile()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "is no profile"),
        ('{"version": "9"}', "is of version '9'"),
        ('{"version": "1"}', "is no profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, said):
    file = tmp_path / "p.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=said):
        ModelProfile.read(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read"):
        ModelProfile.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": ((2, (0.5, 0.6, 0.0, 0.0)),)},
        {"weights": ((2, (1.5, -0.5, 0.0, 0.0)),)},
        {"weights": ((2, (0.5, 0.5)),)},
        {"weights": ((3, (1.0, 0.0, 0.0, 0.0)), (2, (1.0, 0.0, 0.0, 0.0)))},
        {"layers": (0, 2)},
        {"layers": (3, 2)},
        {"layers": (2, 5)},
    ],
)
def test_a_profile_that_does_not_fit_itself_is_refused(wrong):
    data = json.loads(profile().to_json()) | json.loads(json.dumps(wrong))
    with pytest.raises(ValueError):
        ModelProfile.model_validate(data)


def test_a_profile_of_another_shape_is_refused_when_model_and_profile_meet(tiny):
    with pytest.raises(ProfileError, match="layers, query heads and groups"):
        LocalBackend(*tiny, profile=profile(depth=99))


def test_a_run_records_the_weights_that_it_used(tiny):
    config = LOOSE.model_copy(update={"layers": "auto", "head_weights": "auto"})
    with LocalBackend(*tiny, name="tiny", profile=fitting(tiny)) as backend:
        record = backend.generate(request(), config, max_new_tokens=2).audit
    groups, heads = record.model.kv_heads, record.model.query_heads
    assert record.layers == (2, 3)
    assert record.config["head_weights"]["name"] == fitting(tiny).name
    trial = record.trials[0]
    assert trial.weighting == "profile"
    w = np.array(trial.head_weights)
    assert w.sum() == pytest.approx(groups)
    floor = config.zeta * groups / heads
    assert w[0] == pytest.approx(groups * (1 - config.zeta) + floor)
    assert w[1:] == pytest.approx(floor)
    # What the record holds makes the same run again, without the profile.
    again = PruningConfig.model_validate(record.config)
    assert isinstance(again.head_weights, HeadProfile)
    with LocalBackend(*tiny, name="tiny", profile=False, ledger=False) as backend:
        other = backend.generate(request(), again, max_new_tokens=2).audit
    assert other.trials[0].head_weights == trial.head_weights
    assert other.trials[0].removed == trial.removed


def test_a_file_can_be_given_and_false_takes_none(tiny, tmp_path):
    file = tmp_path / "p.json"
    file.write_text(fitting(tiny).to_json(), encoding="utf-8")
    with LocalBackend(*tiny, profile=file) as backend:
        assert backend.profile == fitting(tiny)
    with LocalBackend(*tiny, profile=False) as backend:
        assert backend.profile is None
    with LocalBackend(*tiny) as backend:
        assert backend.profile is None


def test_another_profile_is_another_configuration_to_the_reuse_ledger(tiny):
    heads = tiny[0].config.num_attention_heads
    v = (*(0.0,) * (heads - 1), 1.0)
    other = ModelProfile.model_validate(fitting(tiny).model_dump() | {"weights": ((2, v), (3, v))})
    base = LOOSE.model_copy(update={"layers": "auto", "head_weights": "auto"})
    config = base.model_copy(update={"audit": base.audit.model_copy(update={"seed": 5})})
    with LocalBackend(*tiny, name="tiny", profile=fitting(tiny)) as one:
        assert one.generate(request(), config, max_new_tokens=1).audit.outcome == "pruned"
        with LocalBackend(*tiny, name="tiny", profile=other, ledger=one.ledger) as two:
            found = two.generate(request(), config, max_new_tokens=1).audit
    assert found.reason.code == "audit_reused"


def test_every_shipped_profile_is_sound():
    for one in shipped():
        assert ModelProfile._parse(one.to_json(), "again") == one
        assert all(layer in dict(one.weights) for layer in one.layers)


def test_nothing_of_torch_s_global_state_is_touched(tiny):
    before = torch.get_rng_state()
    LocalBackend(*tiny, profile=fitting(tiny)).close()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("more", [{}, {"mu_min": 0.9}, {"mass_min": 0.99}, {"layers": (1, 2)}])
def test_a_record_of_a_profiled_run_follows_from_itself(tiny, more):
    config = LOOSE.model_copy(update={"layers": "auto", "head_weights": "auto", **more})
    with LocalBackend(*tiny, name="tiny", profile=fitting(tiny)) as backend:
        record = backend.generate(request(), config, max_new_tokens=2).audit
    assert check(record) == []


def test_a_layer_whose_picked_heads_see_no_documents_proposes_nothing(tiny):
    config = LOOSE.model_copy(update={"layers": "auto", "head_weights": "auto", "mu_min": 0.99})
    with LocalBackend(*tiny, name="tiny", profile=fitting(tiny)) as backend:
        record = backend.generate(request(), config, max_new_tokens=2).audit
    assert {trial.verdict.code for trial in record.trials} == {"no_eligible_heads"}
    assert "that the profile picks" in record.trials[0].verdict.message


def test_a_layer_that_the_profile_does_not_know_is_weighed_as_the_paper_does(tiny):
    config = LOOSE.model_copy(update={"layers": (1, 2), "head_weights": "auto", "streak": 9})
    with LocalBackend(*tiny, name="tiny", profile=fitting(tiny)) as backend:
        record = backend.generate(request(), config, max_new_tokens=2).audit
    assert [trial.weighting for trial in record.trials] == ["renyi", "profile"]
