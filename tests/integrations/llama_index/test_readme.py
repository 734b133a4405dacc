"""The README of the adapter: every snippet runs, in order, as a reader would run it."""

import re
from pathlib import Path

import pytest
from llama_index.core import MockEmbedding

import entroprefill_rag.integrations.llama_index as adapter

README = Path(adapter.__file__).parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def run(snippets):
    names = {"__name__": "readme"}
    for number, snippet in enumerate(snippets, start=1):
        exec(compile(snippet, f"snippet {number} of {README.name}", "exec"), names)
    return names


def test_f30_every_snippet_runs(backend, monkeypatch, capsys):
    monkeypatch.setattr(adapter, "LocalEmbedding", lambda: MockEmbedding(embed_dim=4))
    adapter.set_default_backend(backend)
    names = run(SNIPPETS)
    assert len(SNIPPETS) >= 6
    assert names["response"].audit
    assert "kept:" in capsys.readouterr().out


def test_f30_the_readme_explains_every_key_of_the_summary(backend, nodes):
    adapter.set_default_backend(backend)
    response = adapter.EntroPrefillSynthesizer().synthesize("Which word?", nodes)
    text = README.read_text(encoding="utf-8")
    missing = [key for key in response.metadata["entroprefill"] if f"`{key}`" not in text]
    assert set(missing) <= {"model", "full_record", "finish_reason"}


@pytest.mark.slow
@pytest.mark.model
def test_f30_the_quick_start_answers_with_the_packaged_models(smollm2_folder, embedder_folder, smollm2):
    from entroprefill_rag import LocalBackend

    with LocalBackend(*smollm2, name="smollm2-135m") as backend:
        adapter.set_default_backend(backend)
        response = run(SNIPPETS[:1])["response"]
    assert "twice a year" in response.response
    assert "piano" in [node.node_id for node in response.source_nodes]
    assert response.metadata["entroprefill"]["outcome"] == "pruned"
    assert response.metadata["entroprefill"]["dropped_ids"]
    assert response.metadata["entroprefill"]["handoff"]["taken"]
