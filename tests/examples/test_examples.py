"""The example programs: each runs as a reader would run it, prunes, and says so; each explains itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NEEDS = {
    "llama_index_query_engine": ("llama_index.core",),
    "langchain_lcel": ("langchain_core", "langchain_chroma"),
    "langgraph_agent": ("langchain_core", "langgraph"),
}


def run(name, *arguments):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_every_example_is_tested_and_short():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)
    for name in NEEDS:
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_help_names_the_options(name):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    for option in ("question", "--docs", "--store", "--model"):
        assert option in done.stdout


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", NEEDS)
def test_it_answers_the_default_question_prunes_and_says_what_it_dropped(
    name, smollm2_folder, embedder_folder, tmp_path
):
    store = tmp_path / "store"
    done = run(name, "--model", "smollm2-135m", "--store", str(store))
    assert done.returncode == 0, done.stderr
    assert store.exists()
    out = done.stdout
    assert re.search(r"\b(six|6) months\b", out)
    assert re.search(r"^Model: smollm2-135m\. Pruned: Layer \d+ removes [1-4] chunks?", out, re.M), out
    kept, dropped = (re.search(rf"^{word}: +(.*)$", out, re.M)[1].split() for word in ("Kept", "Dropped"))
    files = {f"{path.name}#0" for path in (EXAMPLES / "documents").iterdir()}
    assert "lease.md#0" in kept
    assert dropped
    assert set(kept) | set(dropped) == files
    assert not set(kept) & set(dropped)
    for strength in ("Exact", "Conditional"):
        assert re.search(rf"^{strength}: .+", out, re.M)


@pytest.mark.slow
@pytest.mark.model
def test_a_store_that_is_there_is_reopened_and_documents_are_not_read_again(smollm2_folder, embedder_folder, tmp_path):
    arguments = ("--store", str(tmp_path / "store"))
    assert run("langgraph_agent", *arguments).returncode == 0
    again = run("langgraph_agent", *arguments, "--docs", str(tmp_path / "nowhere"))
    assert again.returncode == 0, again.stderr
    assert "six months" in again.stdout
