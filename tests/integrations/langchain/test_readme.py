"""The README of the adapter: every snippet runs, in order, as a reader would run it."""

import re
from pathlib import Path

import lc_cases
import pytest

import entroprefill_rag.integrations.langchain as adapter
from entroprefill_rag.integrations.langchain import set_default_backend

README = Path(adapter.__file__).parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def run(snippets):
    names = {"__name__": "readme"}
    for number, snippet in enumerate(snippets, start=1):
        exec(compile(snippet, f"snippet {number} of {README.name}", "exec"), names)
    return names


def test_f30_every_snippet_runs(backend, monkeypatch, capsys):
    monkeypatch.setattr(adapter, "LocalEmbeddings", lc_cases.WordHashes)
    set_default_backend(backend)
    names = run(SNIPPETS)
    assert len(SNIPPETS) >= 8
    assert names["output"]["input"] == "How often is the piano tuned?"
    assert len(names["output"]["context"]) + len(names["output"]["dropped"]) == 6
    assert "kept:" in capsys.readouterr().out
    assert names["office_rules"].invoke({"question": "When are the offices cleaned?"})


@pytest.mark.slow
@pytest.mark.model
def test_f30_the_quick_start_answers_with_the_packaged_models(smollm2_folder, embedder_folder, smollm2):
    from entroprefill_rag import LocalBackend

    with LocalBackend(*smollm2, name="smollm2-135m") as backend:
        set_default_backend(backend)
        output = run(SNIPPETS[:1])["output"]
    assert "twice a year" in output["answer"]
    assert "piano" in output["retained_ids"]
    assert output["dropped"]
    assert output["entroprefill"]["outcome"] == "pruned"
