"""What holds for both adapters alike: whose threads work, what is claimed, and which versions are supported."""

import asyncio
import re
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("langchain_core")

import lc_cases
import llama_cases
from packaging.requirements import Requirement
from tiny import model, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.integrations import langchain as lc
from entroprefill_rag.integrations import llama_index as li

ROOT = Path(__file__).resolve().parents[2]
QUERY = llama_cases.QUERY
FRAMEWORKS = {"llama-index": "llama-index-core", "langchain": "langchain-core"}


class Refusing(ThreadPoolExecutor):
    """Stands for an event loop's default pool, which others need too."""

    def submit(self, *args, **kwargs):
        raise AssertionError("work was sent to the default executor")


def test_f10_work_runs_in_a_bounded_pool_of_the_backends_own():
    nodes, documents = llama_cases.make_nodes(), lc_cases.make_documents()
    with LocalBackend(model(), tokenizer(), name="tiny", workers=2) as backend:
        pp = li.EntroPrefillPostprocessor(backend=backend, config=llama_cases.SEEDED)
        synthesizer = pp.synthesizer(max_new_tokens=2)
        ep = lc.EntroPrefillRunnable(backend=backend, pruning=lc_cases.SEEDED, max_tokens=2)
        compressor = lc.EntroPrefillCompressor(backend=backend, pruning=lc_cases.SEEDED)
        given = {"input": QUERY, "context": documents}
        most = 0

        async def llama():
            return await synthesizer.asynthesize(QUERY, await pp.apostprocess_nodes(nodes, query_str=QUERY))

        async def watch(running):
            nonlocal most
            while not all(task.done() for task in running):
                most = max(most, threading.active_count())
                await asyncio.sleep(0.002)

        async def everything():
            asyncio.get_running_loop().set_default_executor(Refusing())
            calls = [llama(), ep.ainvoke(given), compressor.acompress_documents(documents, QUERY)]
            await asyncio.gather(*calls)
            running = [asyncio.create_task(ep.ainvoke(given)) for _ in range(8)]
            await watch(running)
            return await asyncio.gather(*running)

        before = threading.active_count()
        assert len(asyncio.run(everything())) == 8
        # Two workers, and a thread for each generation at work.
        assert most <= before + 4


def test_f17_full_mode_says_what_is_exact_probabilistic_and_conditional():
    with LocalBackend(model(), tokenizer(), name="tiny") as backend:
        synthesizer = li.EntroPrefillSynthesizer(backend, config=llama_cases.SEEDED, generation={"max_new_tokens": 2})
        response = synthesizer.synthesize(QUERY, llama_cases.make_nodes())
        ep = lc.EntroPrefillRunnable(backend=backend, pruning=lc_cases.SEEDED, max_tokens=2)
        output = ep.invoke({"input": QUERY, "context": lc_cases.make_documents()})
    for brief in (response.metadata["entroprefill"], output["entroprefill"]):
        assert brief["outcome"] == "pruned"
        assert set(brief["claims"]) >= {"exact", "probabilistic", "conditional", "not_claimed"}
        assert all(brief["claims"][kind] for kind in ("exact", "probabilistic", "conditional", "not_claimed"))
        assert "Another model" not in brief["claims"]["conditional"]


@pytest.mark.parametrize("folder", ["llama_index", "langchain"])
def test_f17_the_readmes_promise_neither_speed_nor_equal_answers(folder):
    text = (ROOT / "integrations" / folder / "README.md").read_text(encoding="utf-8")
    assert "There is no promise of speed or of equal answers." in text
    assert not re.search(r"\b(faster|speed-?up|\d+ ?x\b|as accurate|lossless)", text, flags=re.IGNORECASE)


def pins(name):
    lines = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_f26_the_bounds_of_an_extra_are_the_versions_that_are_tested(extra):
    with (ROOT / "pyproject.toml").open("rb") as file:
        [requirement] = map(Requirement, tomllib.load(file)["project"]["optional-dependencies"][extra])
    package = FRAMEWORKS[extra]
    assert requirement.name == package
    [lowest] = [each.version for each in requirement.specifier if each.operator == ">="]
    assert pins("lowest")[package].startswith(lowest)
    for tested in (pins("lowest")[package], pins("newest")[package], version(package)):
        assert requirement.specifier.contains(tested)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [recipe] = re.findall(r"^test-lowest:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert "tests/integrations" in recipe


def test_f27_the_llama_index_adapter_runs_without_a_deprecated_api():
    for file in (ROOT / "integrations" / "llama_index").glob("*.py"):
        found = re.search(r"ServiceContext|langchain_community|llama_index\.legacy", file.read_text(encoding="utf-8"))
        assert not found, f"{file.name}: {found}"
    code = (
        "import warnings, llama_index.core\n"  # what the framework warns about by itself is not ours
        "warnings.simplefilter('error', DeprecationWarning)\n"
        "import entroprefill_rag.integrations.llama_index as a\n"
        "a.EntroPrefillPostprocessor().synthesizer(); a.EntroPrefillLLM(); a.LocalEmbedding()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
