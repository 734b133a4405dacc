"""Requests and configurations: what is accepted, what is refused, and with which words."""

import pytest
from pydantic import ValidationError

from entroprefill_rag import AuditConfig, Chunk, PruningConfig, RagRequest
from entroprefill_rag.config import PromptRows, SuffixRows


def test_duplicate_ids_are_named():
    with pytest.raises(ValidationError, match=r"'a'.*occur more than once"):
        RagRequest(query="q", chunks=[Chunk(id="a", text="1"), Chunk(id="a", text="2")])


@pytest.mark.parametrize("query", ["", "   ", "\n"])
def test_an_empty_query_is_refused(query):
    with pytest.raises(ValidationError, match="query is empty"):
        RagRequest(query=query)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["list"]])
def test_text_must_be_text(text):
    with pytest.raises(ValidationError):
        Chunk(id="a", text=text)


def test_history_accepts_turns_mappings_and_pairs():
    request = RagRequest(query="q", history=[("user", "hi"), {"role": "assistant", "content": "yes"}])
    assert [turn.role for turn in request.history] == ["user", "assistant"]
    with pytest.raises(ValidationError):
        RagRequest(query="q", history=[("system", "hi")])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": ()}, "layers is empty"),
        ({"layers": (0, 3)}, "layer 0 may not be monitored"),
        ({"layers": (5, 3)}, "must ascend"),
        ({"eps_row": 0.0}, "eps_row must lie"),
        ({"eps_row": (0.1, 1.5)}, "eps_row must lie"),
        ({"min_saving": 0.6}, "min_saving <= target_saving"),
        ({"zeta": 0.0}, "zeta"),
        ({"m0": 0}, "m0"),
        ({"nonsense": 1}, "Extra inputs"),
        ({"audit": {"m_a": 1}}, "at least 2"),
        ({"audit": {"observers": ()}}, "at least 1"),
        ({"audit": {"delta": 1.0}}, "delta"),
    ],
)
def test_wrong_settings_are_refused_with_the_rule(settings, words):
    with pytest.raises(ValidationError, match=words):
        PruningConfig(**settings)


def test_configurations_are_frozen_and_survive_json():
    config = PruningConfig(layers=(4, 8), audit=AuditConfig(observers=(SuffixRows(), PromptRows()), m_a=100))
    assert PruningConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError):
        config.m0 = 3


def test_a_callable_head_weight_is_named_in_json():
    def flat(entropy, eligible):
        return eligible

    assert "callable:" in PruningConfig(head_weights=flat).model_dump_json()
