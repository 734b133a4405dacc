"""What both adapters share: ids that cannot collide, and a record in brief."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.engine.prompt_style import PromptStyle
from entroprefill_rag.integrations._shared import BackendSource, restyled, set_default_backend, summary, unique_ids

ID = st.one_of(st.none(), st.sampled_from(["", "a", "a#2", "a#3", "b", "text-1"]))


@given(st.lists(st.tuples(ID, st.sampled_from(["", "x", "y"])), max_size=12))
def test_ids_are_unique_deterministic_and_the_callers_own_where_they_can_be(pairs):
    given_ids, texts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    made = unique_ids(given_ids, texts)
    assert made == unique_ids(given_ids, texts)
    assert len(set(made.ids)) == len(made.ids) == len(pairs)
    for position, (own, new) in enumerate(zip(given_ids, made.ids, strict=True)):
        if position not in made.stand_ins:
            assert own == new
        elif own:
            assert made.stand_ins[position] == "duplicate"
            assert own in made.ids[:position]
        else:
            assert made.stand_ins[position] == "missing"
    assert json.dumps(made.report())


def test_a_summary_is_small_json_that_agrees_with_the_record():
    with LocalBackend(model(), tokenizer(), name="tiny") as backend:
        result = backend.generate(request(), LOOSE, max_new_tokens=2)
    brief = summary(result.audit, mode="full", usage=result.usage, timings=result.timings, extra=1)
    assert len(json.dumps(brief)) < 5000
    assert brief["retained_ids"] == list(result.retained_ids)
    assert brief["dropped_ids"] == list(result.dropped_ids)
    assert brief["tokens"]["kept"] == result.usage.kept_tokens
    assert brief["caps"]["max_discarded"] == result.audit.trial.max_discarded
    assert [audit["worst"] for audit in brief["audits"]] == [max(audit.upper) for audit in result.audit.trial.audits]
    assert brief["claims"]["not_claimed"]
    assert brief["extra"] == 1


def test_another_style_shares_model_hooks_and_outlives_the_name_of_its_origin():
    import gc

    origin = LocalBackend(model(), tokenizer(), name="tiny")
    plain = restyled(origin, PromptStyle(template="{context} | {query}", instruction=""))
    assert plain.model is origin.model
    assert restyled(origin, origin.style) is origin
    assert origin.layout(request()).hash != plain.layout(request()).hash
    del origin
    gc.collect()
    assert plain.generate(request(), LOOSE, max_new_tokens=2).pruned
    plain.close()


def test_the_configured_backend_can_be_a_name():
    set_default_backend("no/such-folder-or-model")
    try:
        with pytest.raises(ValueError, match="no/such-folder-or-model"):
            BackendSource().get()
    finally:
        set_default_backend(None)


def test_the_folder_is_not_imported_twice_under_two_names():
    root = Path(__file__).resolve().parents[2]
    code = "try: import integrations\nexcept ImportError as error: print(error)"
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert "import entroprefill_rag.integrations instead" in out
