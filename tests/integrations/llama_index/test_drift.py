"""A pruned answer that drifts: what was handed to LlamaIndex is never taken back, and sources are what was read."""

from __future__ import annotations

import asyncio

import pytest
from llama_cases import QUERY, SEEDED, ids

from entroprefill_rag.integrations.llama_index import EntroPrefillPostprocessor, EntroPrefillSynthesizer, get_audit

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def drifting(on_drift, threshold=0.05):
    return SEEDED.model_copy(update={"on_drift": on_drift, "drift_threshold": threshold})


def synthesizer(backend, config, **more):
    return EntroPrefillSynthesizer(backend, config=config, generation=GREEDY, **more)


@pytest.fixture
def full(backend, nodes):
    """The answer without pruning."""
    off = SEEDED.model_copy(update={"enabled": False})
    return synthesizer(backend, off).synthesize(QUERY, nodes).response


def assert_restarted(response, text, full, nodes):
    assert text == full
    assert ids(response.source_nodes) == ids(nodes)
    told = response.metadata["entroprefill"]
    assert (told["outcome"], told["reason"], told["dropped_ids"]) == ("bypassed", "drift_restart", [])
    assert told["decode"]["action"] == "restarted_full"
    assert get_audit(response).reason.code == "drift_restart"


@pytest.mark.parametrize("handed", [False, True], ids=["one pass", "handed over"])
def test_a_restart_answers_in_full_and_names_all_nodes(backend, nodes, full, written, handed):
    config = drifting("restart_full")
    for streaming in (False, True):
        written.events.clear()
        pp = EntroPrefillPostprocessor(backend=backend, config=config)
        synth = pp.synthesizer(streaming=streaming, generation=GREEDY)
        given = pp.postprocess_nodes(nodes, query_str=QUERY) if handed else nodes
        assert len(given) < len(nodes) or not handed
        response = synth.synthesize(QUERY, given)
        text = "".join(response.response_gen) if streaming else response.response
        assert_restarted(response, text, full, nodes)
        audits = [event.audit["outcome"] for event in written.of("EntroPrefillAuditEvent")]
        assert audits == (["pruned", "bypassed"] if handed else ["bypassed"])
        assert written.of("LLMCompletionEndEvent")[-1].response.text == full


def test_async_streams_hold_back_as_well(backend, nodes, full):
    async def main():
        synth = synthesizer(backend, drifting("restart_full"), streaming=True)
        response = await synth.asynthesize(QUERY, nodes)
        return response, "".join([piece async for piece in response.async_response_gen()])

    response, text = asyncio.run(main())
    assert_restarted(response, text, full, nodes)


def test_an_answer_that_does_not_drift_is_the_pruned_one(backend, nodes):
    expected = synthesizer(backend, SEEDED).synthesize(QUERY, nodes)
    response = synthesizer(backend, drifting("restart_full", 0.99), streaming=True).synthesize(QUERY, nodes)
    assert "".join(response.response_gen) == expected.response
    assert ids(response.source_nodes) == ids(expected.source_nodes) != ids(nodes)


def test_a_stop_is_a_finish_reason(backend, nodes, written):
    response = synthesizer(backend, drifting("stop")).synthesize(QUERY, nodes)
    assert response.metadata["entroprefill"]["finish_reason"] == "drift"
    assert written.of("LLMCompletionEndEvent")[-1].response.raw["finish_reason"] == "drift"
