"""Making, copying, storing and importing the classes."""

import copy
import importlib
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from langchain_core.load import dumpd
from lc_cases import QUERY
from tiny import model, tokenizer

import entroprefill_rag.integrations.langchain as adapter
from entroprefill_rag import LocalBackend
from entroprefill_rag.errors import ConfigError, ModelSourceError
from entroprefill_rag.integrations.langchain import (
    ChatEntroPrefill,
    EntroPrefillCompressor,
    EntroPrefillRunnable,
    set_default_backend,
)

CLASSES = (EntroPrefillRunnable, ChatEntroPrefill, EntroPrefillCompressor)
SOURCE = Path(adapter.__file__).parent


def run(code, *flags):
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("made", CLASSES)
def test_f01_making_one_loads_nothing(made):
    # What langchain-core brings along itself (transformers, in 1.0) is not ours.
    code = (
        "import sys; from langchain_core.language_models import BaseChatModel; before = set(sys.modules)\n"
        f"from entroprefill_rag.integrations.langchain import {made.__name__} as M; M()\n"
        "heavy = ('torch', 'transformers', 'scipy', 'llama_index')\n"
        "print([m for m in heavy if m in sys.modules and m not in before])"
    )
    assert run(code).strip() == "[]"


def test_f01_without_a_model_the_error_says_what_to_run(monkeypatch, documents):
    from entroprefill_rag.engine import sources

    monkeypatch.setattr(sources, "installed", lambda: ())
    with pytest.raises(ModelSourceError, match="install"):
        EntroPrefillRunnable().invoke({"input": QUERY, "context": documents})


def test_f01_the_model_is_loaded_once_however_many_ask_at_a_time(monkeypatch, documents):
    loads = []

    def load(name, **kwargs):
        loads.append(name)
        return LocalBackend(model(), tokenizer(), name=name)

    monkeypatch.setattr(LocalBackend, "from_pretrained", load)
    ep = EntroPrefillRunnable(model="some/model", max_tokens=1)
    threads = [threading.Thread(target=ep.invoke, args=({"input": QUERY, "context": documents},)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["some/model"]
    ep.source.get().close()


def test_a_default_backend_serves_those_that_were_given_none(backend, documents):
    set_default_backend(backend)
    assert EntroPrefillRunnable(max_tokens=1).invoke({"input": QUERY, "context": documents})["answer"] is not None


@pytest.mark.parametrize("made", CLASSES)
def test_f13_copies_and_pickles_share_the_backend_and_carry_no_weights(made, backend):
    original = made(backend=backend, title_key="page")
    stored = pickle.dumps(original)
    assert len(stored) < 10_000
    for twin in (copy.copy(original), copy.deepcopy(original), pickle.loads(stored), original.model_copy(deep=True)):
        assert twin.source.get() is backend
        assert twin.title_key == "page"


@pytest.mark.parametrize("made", CLASSES)
def test_f13_a_pickle_by_name_loads_nothing(made):
    twin = pickle.loads(pickle.dumps(made(model="some/model")))
    assert not twin.source.loaded
    assert twin.source.name == "some/model"


@pytest.mark.parametrize("made", CLASSES)
def test_f13_short_repr_and_safe_serialization(made, backend):
    shown = repr(made(backend=backend, **({} if made is EntroPrefillCompressor else {"api_key": "s3cret"})))
    assert len(shown) < 500
    assert "s3cret" not in shown
    if made is not EntroPrefillCompressor:
        assert not made.is_lc_serializable()
        assert dumpd(made(backend=backend))["type"] == "not_implemented"


@pytest.mark.parametrize("made", CLASSES)
def test_arguments_that_are_not_known_are_refused(made, backend):
    with pytest.raises(ConfigError, match="no argument 'temprature'"):
        made(temprature=1)
    with pytest.raises(ConfigError, match="both backend"):
        made(backend=backend, model="other")


def test_fields_can_be_configured_at_run_time(ep, documents):
    from langchain_core.runnables import ConfigurableField

    chain = ep.configurable_fields(max_tokens=ConfigurableField(id="most"))
    output = chain.with_config(configurable={"most": 2}).invoke({"input": QUERY, "context": documents})
    assert output["usage_metadata"]["output_tokens"] == 2


def test_f25_without_langchain_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "import entroprefill_rag\n"
        "try: import entroprefill_rag.integrations.langchain\n"
        "except ImportError as error: print(error)"
    )
    assert "pip install -e '.[langchain]' in a clone" in run(code)


def test_f25_the_adapter_needs_no_other_framework():
    code = (
        "import sys; sys.modules['llama_index'] = None; sys.modules['langchain_community'] = None\n"
        "sys.modules['langchain'] = None; sys.modules['langgraph'] = None\n"
        "import entroprefill_rag.integrations.langchain as a; print(len(a.__all__))"
    )
    assert int(run(code)) == len(adapter.__all__)


def test_f26_every_public_name_can_be_had():
    for name in adapter.__all__:
        assert getattr(importlib.import_module(adapter.__name__), name) is not None


def test_f27_nothing_is_imported_from_community_and_nothing_deprecated_is_used():
    for file in SOURCE.glob("*.py"):
        assert not re.search(r"langchain_community|langchain_classic|ServiceContext", file.read_text(encoding="utf-8"))
    code = (
        "import entroprefill_rag.integrations.langchain as a\n"
        "for made in (a.EntroPrefillRunnable, a.ChatEntroPrefill, a.EntroPrefillCompressor): made()"
    )
    run(code, "-W", "error::DeprecationWarning")
