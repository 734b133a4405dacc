"""The postprocessor: what it keeps, and that nothing of the caller's is changed."""

import copy
import json
import math
import pickle
import subprocess
import sys
import threading

import pytest
from llama_cases import QUERY, SEEDED, STRICT, ids, make_nodes
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.schema import (
    Document,
    ImageNode,
    IndexNode,
    MediaResource,
    MetadataMode,
    Node,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from entroprefill_rag import LocalBackend, PruningConfig
from entroprefill_rag.errors import ConfigError, ModelSourceError, RequestError, TemplateError
from entroprefill_rag.integrations._shared import BackendSource
from entroprefill_rag.integrations.llama_index import (
    EntroPrefillPostprocessor,
    RetainedNode,
    get_audit,
    set_default_backend,
)


@pytest.fixture
def pp(backend):
    return EntroPrefillPostprocessor(backend=backend, config=SEEDED)


def test_f01_constructs_without_loading_and_says_how_to_get_a_model(monkeypatch, nodes):
    monkeypatch.setattr("entroprefill_rag.engine.sources.installed", list)
    pp = EntroPrefillPostprocessor()
    assert not pp._source.loaded
    with pytest.raises(ModelSourceError, match="entroprefill models install smollm2-135m"):
        pp.postprocess_nodes(nodes, query_str=QUERY)


def test_f01_loads_once_under_threads(monkeypatch, backend):
    loads = []

    def slow(cls, name):
        loads.append(name)
        threading.Event().wait(0.05)
        return backend

    monkeypatch.setattr(LocalBackend, "from_pretrained", classmethod(slow))
    sources = [BackendSource(model="some-model") for _ in range(8)]
    found = []
    threads = [threading.Thread(target=lambda s=source: found.append(s.get())) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["some-model"]
    assert all(each is backend for each in found)


def test_f01_a_configured_backend_comes_before_the_environment(monkeypatch, backend, nodes):
    monkeypatch.setenv("ENTROPREFILL_MODEL", "no-such-model")
    set_default_backend(backend)
    assert len(EntroPrefillPostprocessor(config=SEEDED).postprocess_nodes(nodes, query_str=QUERY)) == 2


def test_f03_retained_nodes_keep_id_metadata_order_and_inputs_are_not_mutated(pp, nodes):
    nodes[0].node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="doc")
    before = copy.deepcopy(nodes)
    kept = pp.postprocess_nodes(nodes, query_bundle=QueryBundle(QUERY))
    assert nodes == before
    assert 0 < len(kept) < len(nodes)
    given = {node.node_id: node for node in nodes}
    assert ids(kept) == [each for each in ids(nodes) if each in ids(kept)]
    for node in kept:
        assert node.node is given[node.node_id].node
        assert node.score == given[node.node_id].score
    assert tuple(ids(kept)) == get_audit(kept).retained_ids


def test_f04_scores_stay_unless_asked_and_are_python_floats(backend, nodes):
    import numpy as np

    nodes[0].score = np.float32(0.5)
    nodes[1].score = None
    pp = EntroPrefillPostprocessor(backend=backend, config=STRICT)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    assert [type(node.score) for node in kept] == [float, type(None), float, float, float]
    assert json.loads(kept[0].to_json())["score"] == 0.5
    pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED, replace_score=True)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    trial = get_audit(kept).trial
    assert [node.score for node in kept] == [trial.scores[int(node.node_id[1:])] for node in kept]
    assert all(type(node.score) is float and math.isfinite(node.score) for node in kept)


def test_f05_a_note_in_metadata_is_asked_for_and_reaches_neither_model_nor_embedder(backend, nodes):
    pp = EntroPrefillPostprocessor(backend=backend, config=SEEDED, annotate=True)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    given = {node.node_id: node for node in nodes}
    for node in kept:
        original = given[node.node_id]
        assert json.dumps(node.metadata["entroprefill"])
        assert "entroprefill" not in original.metadata
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert node.get_content(metadata_mode=mode) == original.get_content(metadata_mode=mode)


def test_f06_the_model_reads_the_llm_text_of_the_nodes(backend, nodes):
    texts = PruningConfig(**{**SEEDED.model_dump(), "include_text": True})
    for mode in (MetadataMode.LLM, MetadataMode.NONE):
        pp = EntroPrefillPostprocessor(backend=backend, config=texts, metadata_mode=mode)
        record = get_audit(pp.postprocess_nodes(nodes, query_str=QUERY))
        assert [chunk.text for chunk in record.prompt.chunks] == [n.get_content(metadata_mode=mode) for n in nodes]
    assert "page: 0" in nodes[0].get_content(metadata_mode=MetadataMode.LLM)


def test_f06_nodes_of_other_kinds_pass_and_what_is_more_than_text_is_protected(pp):
    text = " ".join(f"word{j}" for j in range(6))
    kinds = [
        Document(text=text, id_="document"),
        ImageNode(text=text, image="aGk=", id_="image"),
        IndexNode(text=text, index_id="x", id_="index"),
        Node(id_="both", text_resource=MediaResource(text=text), image_resource=MediaResource(data=b"aGk=")),
        TextNode(text=text, id_="text"),
        ImageNode(image="aGk=", id_="bare"),
    ]
    kept = pp.postprocess_nodes([NodeWithScore(node=kind) for kind in kinds], query_str=QUERY)
    protected = {"image", "both", "bare"}
    assert protected <= set(ids(kept))
    assert set(get_audit(kept).protected_ids) == protected


def test_f07_an_empty_list_loads_nothing_and_says_nothing(written, monkeypatch):
    pp = EntroPrefillPostprocessor()
    assert pp.postprocess_nodes([], query_str=QUERY) == []
    assert not pp._source.loaded
    assert not written.of("ReRankStartEvent")


def test_f07_no_query_is_a_value_error(pp, nodes):
    for bad in ({}, {"query_str": ""}, {"query_str": "  "}):
        with pytest.raises(RequestError, match="query_str"):
            pp.postprocess_nodes(nodes, **bad)
    assert issubclass(RequestError, ValueError)


def test_things_of_other_types_are_refused_by_name(pp, nodes):
    with pytest.raises(RequestError, match="the query must be text, got int"):
        pp.postprocess_nodes(nodes, query_str=5)
    with pytest.raises(RequestError, match="must be NodeWithScore, got str"):
        pp.postprocess_nodes(["a passage", "another"], query_str=QUERY)


@pytest.mark.parametrize("count", [1, 2])
def test_f07_as_few_nodes_as_must_stay_pass_with_a_reason(pp, count):
    kept = pp.postprocess_nodes(make_nodes(count), query_str=QUERY)
    assert len(kept) == count
    assert get_audit(kept).outcome == "bypassed"


def test_f07_duplicates_and_nodes_without_text_do_not_collide(pp):
    same = make_nodes(1)[0]
    twin = NodeWithScore(node=TextNode(text=same.node.text, id_="twin"))
    empty = NodeWithScore(node=TextNode(text="", id_="empty"))
    given = [same, same, twin, empty, *make_nodes(5)[1:]]
    kept = pp.postprocess_nodes(given, query_str=QUERY)
    record = get_audit(kept)
    assert len({chunk.id for chunk in record.prompt.chunks}) == len(given)
    assert "empty" in ids(kept)
    assert [entry["why"] for entry in kept[0]._trace.summary["stand_in_ids"]] == ["duplicate"]
    positions = [node.position for node in kept]
    assert [given[at].node for at in positions] == [node.node for node in kept]


def test_f08_a_bypass_returns_the_input_with_a_reason(backend, nodes):
    pp = EntroPrefillPostprocessor(backend=backend, config=STRICT)
    kept = pp.postprocess_nodes(nodes, query_str=QUERY)
    assert [node.node for node in kept] == [node.node for node in nodes]
    record = get_audit(kept)
    assert record.outcome == "bypassed"
    assert record.reason.message


@pytest.mark.parametrize("copied", ["pickle", "dict", "deepcopy"])
def test_f13_copies_keep_the_settings_and_share_the_backend(pp, backend, nodes, copied):
    made = {
        "pickle": lambda: pickle.loads(pickle.dumps(pp)),
        "dict": lambda: EntroPrefillPostprocessor.from_dict(json.loads(json.dumps(pp.to_dict()))),
        "deepcopy": lambda: copy.deepcopy(pp),
    }[copied]()
    assert made._source.get() is backend
    assert made.config == pp.config
    assert ids(made.postprocess_nodes(nodes, query_str=QUERY)) == ids(pp.postprocess_nodes(nodes, query_str=QUERY))


def test_f13_a_pickle_holds_no_weights_and_a_lost_backend_is_named(pp):
    data = pickle.dumps(pp)
    assert len(data) < 20_000
    code = (
        "import pickle, sys; pp = pickle.loads(sys.stdin.buffer.read()); print(pp._source.loaded)\n"
        "try: pp._source.get()\nexcept Exception as error: print(type(error).__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True).stdout.split()
    assert out == [b"False", ConfigError.__name__.encode()]


def test_f13_names_are_stable_and_short():
    pp = EntroPrefillPostprocessor(model="some/model")
    assert pp.class_name() == "EntroPrefillPostprocessor"
    assert repr(pp) == "EntroPrefillPostprocessor(model='some/model', mode='auto')"


def test_f17_filter_mode_says_that_another_model_is_outside_its_claims(pp, nodes):
    record = get_audit(pp.postprocess_nodes(nodes, query_str=QUERY))
    assert "Another model" in record.claims.conditional
    assert record.claims.exact


def test_f18_templates_with_the_query_first_are_refused_at_once(backend):
    with pytest.raises(TemplateError, match="before"):
        EntroPrefillPostprocessor(backend=backend, text_qa_template="{query_str}\n{context_str}")


def test_f25_the_missing_framework_is_named_with_the_extra():
    code = (
        "import sys; sys.modules['llama_index'] = None\n"
        "try: import entroprefill_rag.integrations.llama_index\nexcept ImportError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install -e '.[llama-index]' in a clone" in out


def test_f25_the_adapter_loads_neither_torch_nor_the_other_framework():
    code = (
        "import sys, entroprefill_rag.integrations.llama_index\n"
        "print(*[m for m in ('torch', 'transformers', 'langchain_core', 'scipy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_f28_the_same_seed_gives_the_same_audit(pp, nodes):
    first, second = (get_audit(pp.postprocess_nodes(nodes, query_str=QUERY)) for _ in range(2))
    assert first.audit == second.audit
    assert first.audit.seed == 7
    assert first.trials == second.trials


def test_another_postprocessor_may_follow(pp, nodes):
    kept = LongContextReorder().postprocess_nodes(pp.postprocess_nodes(nodes, query_str=QUERY), query_str=QUERY)
    assert all(isinstance(node, RetainedNode) for node in kept)
    assert get_audit(kept)
