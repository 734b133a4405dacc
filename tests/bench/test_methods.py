"""The catalogue: names, settings, and what changes a digest."""

import pytest

from entroprefill_rag import PruningConfig
from entroprefill_rag.bench.methods import QUICK, catalogue, chosen
from entroprefill_rag.errors import ConfigError

KNOWN = catalogue(layer=3, budget=0.5)


def test_every_method_says_what_it_is_and_where_it_comes_from():
    names = "full ours layer cap-0.1 cap-0.3 cap-0.5 paper random first embedder midprefill-last midprefill-mean"
    assert list(KNOWN) == [*names.split(), "second-pass", "llmlingua", "gold", "none"]
    assert all(method.what and method.origin for method in KNOWN.values())
    assert set(QUICK) <= set(KNOWN)


def test_ours_is_the_default_configuration():
    assert KNOWN["ours"].config == PruningConfig()


@pytest.mark.parametrize("cap", [0.1, 0.3, 0.5])
def test_caps_and_audit_limit_go_together(cap):
    config = KNOWN[f"cap-{cap:g}"].config
    assert (config.eps_row, config.audit.eps_audit) == (cap, cap)


def test_the_papers_settings_are_the_papers():
    config = KNOWN["paper"].config
    assert (config.head_weights, config.entropy_over, config.audit.bound) == ("renyi", "outside_sinks", "hoeffding")
    assert (config.evidence, config.reach) == ("layer", "all")


def test_settings_change_a_digest_and_a_seed_does_not_change_settings():
    other = catalogue(layer=4, budget=0.5)
    assert other["midprefill-mean"].digest != KNOWN["midprefill-mean"].digest
    assert other["ours"].digest == KNOWN["ours"].digest
    assert len({method.digest for method in KNOWN.values()}) == len(KNOWN)
    assert KNOWN["ours"].seeded(7).audit.seed == 7
    assert KNOWN["ours"].config.audit.seed is None


def test_the_full_run_is_always_there():
    assert [method.name for method in chosen(KNOWN, ["gold", "random"])] == ["full", "random", "gold"]
    assert len(chosen(KNOWN, [])) == len(KNOWN)


def test_a_cross_encoder_is_a_method_of_its_own():
    made = catalogue(layer=3, budget=0.5, cross_encoders=["some/model"])
    assert made["cross-encoder:some/model"].ranker == "some/model"


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no method 'magic'; choose from full, ours"):
        chosen(KNOWN, ["magic"])
