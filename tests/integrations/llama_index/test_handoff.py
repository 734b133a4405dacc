"""One prefill from postprocessor to synthesizer: taken once, only for what was asked, and never kept for long."""

import gc
import pickle
import threading
import weakref

import pytest
from llama_cases import QUERY, SEEDED, ids, make_nodes
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore

from entroprefill_rag.integrations.llama_index import EntroPrefillPostprocessor, EntroPrefillSynthesizer, get_audit

GENERATION = {"max_new_tokens": 4}


@pytest.fixture
def pair(backend):
    pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED)
    return pp, pp.synthesizer(**GENERATION)


def handoff(response):
    return response.metadata["entroprefill"]["handoff"]


def prefills(backend, monkeypatch):
    """Count forwards over a whole prompt."""
    seen = []
    backend.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]) if kwargs["input_ids"].shape[1] > 1 else None,
        with_kwargs=True,
    )
    return seen


def test_f16_the_prefill_is_done_once(pair, backend, nodes, monkeypatch):
    pp, synthesizer = pair
    seen = prefills(backend, monkeypatch)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    response = synthesizer.synthesize(QUERY, kept)
    assert len(seen) == 1
    assert handoff(response) == {"taken": True, "why": None}
    assert response.metadata["entroprefill"]["mode"] == "handoff"
    assert ids(response.source_nodes) == ids(kept)


def test_f16_the_answer_is_that_of_the_synthesizer_alone(pair, backend, nodes):
    pp, synthesizer = pair
    alone = EntroPrefillSynthesizer(backend, config=SEEDED, generation=GENERATION).synthesize(QUERY, nodes)
    handed = synthesizer.synthesize(QUERY, pp.postprocess_nodes(nodes, query_str=QUERY))
    assert handed.response == alone.response
    assert handed.audit.trials == alone.audit.trials


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("order", "order"),
        ("fewer", "taken out"),
        ("foreign", "other nodes"),
        ("text", "text"),
        ("query", "query"),
        ("template", "template"),
        ("reorder", "order"),
    ],
)
def test_f16_what_changed_on_the_way_is_noticed_recorded_and_answered_in_full(pair, nodes, change, why):
    pp, synthesizer = pair
    pp.config = SEEDED.model_copy(update={"m0": 3})
    synthesizer._config = pp.config
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    assert len(kept) == 3
    handle, query = kept[0].handle, QUERY
    if change == "order":
        kept = kept[::-1]
    elif change == "fewer":
        kept = kept[:-1]
    elif change == "foreign":
        kept = [*kept, make_nodes(9)[-1]]
    elif change == "text":
        kept[1].node.set_content("something else")
    elif change == "query":
        query = "Another question?"
    elif change == "template":
        synthesizer.update_prompts({"text_qa_template": PromptTemplate("Docs: {context_str}\nQ: {query_str}\nA:")})
    elif change == "reorder":
        kept = LongContextReorder().postprocess_nodes(kept, query_str=QUERY)
    response = synthesizer.synthesize(query, kept)
    assert why in handoff(response)["why"]
    assert not handoff(response)["taken"]
    assert response.response
    assert handle.take() is None
    assert set(ids(response.source_nodes)) <= set(ids(kept))


def test_f16_a_prefill_that_is_gone_is_done_again_over_all_nodes(pair, nodes):
    pp, synthesizer = pair
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    first, second = synthesizer.synthesize(QUERY, kept), synthesizer.synthesize(QUERY, kept)
    assert (handoff(first)["taken"], handoff(second)["taken"]) == (True, False)
    assert first.response == second.response
    assert ids(first.source_nodes) == ids(second.source_nodes)


def test_f11_at_most_so_many_prefills_wait(backend, nodes):
    pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED, max_pending=2)
    synthesizer = pp.synthesizer(**GENERATION)
    waiting = [pp.postprocess_nodes(nodes, query_str=QUERY) for _ in range(4)]
    assert len(pp._waiting) == 2
    taken = [handoff(synthesizer.synthesize(QUERY, kept))["taken"] for kept in waiting]
    assert taken == [False, False, True, True]
    assert len(pp._waiting) == 0


def test_f11_nodes_that_are_dropped_free_their_prefill(pair, nodes):
    pp, _ = pair
    before = threading.active_count()
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    assert threading.active_count() == before + 1
    del kept
    gc.collect()
    assert len(pp._waiting) == 0
    assert threading.active_count() == before


def test_f11_a_kept_response_holds_no_tensor(pair, nodes):
    import torch

    pp, synthesizer = pair
    response = synthesizer.synthesize(QUERY, pp.postprocess_nodes(nodes, query_str=QUERY))
    seen, stack = set(), [response]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, (type, type(gc))) or one is synthesizer:
            continue
        seen.add(id(one))
        assert not isinstance(one, torch.Tensor)
        if type(one).__module__.split(".")[0] in ("entroprefill_rag", "llama_index", "builtins") and not callable(one):
            stack += gc.get_referents(one)
    assert len(seen) > 100


def test_f13_a_pickled_node_or_response_keeps_its_record_and_leaves_the_prefill(pair, nodes):
    pp, synthesizer = pair
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    copied = pickle.loads(pickle.dumps(kept))
    assert get_audit(copied) == get_audit(kept)
    assert [node.position for node in copied] == [node.position for node in kept]
    assert copied[0].handle is None
    assert kept[0].handle is not None
    response = synthesizer.synthesize(QUERY, kept)
    again = pickle.loads(pickle.dumps(response))
    assert again.audit == response.audit
    assert get_audit(again.source_nodes[0]) is again.audit
    assert again.metadata == response.metadata


def test_f17_without_its_synthesizer_it_filters(backend, nodes):
    pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED)
    synthesizer = pp.synthesizer()
    assert pp.postprocess_nodes(nodes, query_str=QUERY)[0].handle is not None
    reference = weakref.ref(synthesizer)
    del synthesizer
    gc.collect()
    assert reference() is None
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    assert kept[0].handle is None
    assert "Another model" in get_audit(kept).claims.conditional


def test_mode_handoff_works_with_a_synthesizer_made_apart(backend, nodes):
    pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED, mode="handoff")
    apart = EntroPrefillSynthesizer(backend, config=SEEDED)
    assert handoff(apart.synthesize(QUERY, pp.postprocess_nodes(nodes, query_str=QUERY)))["taken"]


def test_plain_nodes_after_a_filter_are_answered_in_full(backend, nodes):
    pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED, mode="filter")
    synthesizer = pp.synthesizer(**GENERATION)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    plain = [NodeWithScore(node=node.node, score=node.score) for node in kept]
    response = synthesizer.synthesize(QUERY, plain)
    assert response.metadata["entroprefill"]["mode"] == "full"
    assert "handoff" not in response.metadata["entroprefill"]
