"""What a notebook shows of a result and of a record: a short table, made of text only."""

import pytest
import tiny
from lxml import html as parsing

from entroprefill_rag import LocalBackend


@pytest.fixture(scope="module")
def results():
    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as backend:
        yield [
            backend.generate(tiny.request(), config, max_new_tokens=4, do_sample=False)
            for config in (tiny.LOOSE, tiny.LOOSE.model_copy(update={"enabled": False}))
        ]


def rows(shown):
    return {row[0].text_content(): row[1].text_content() for row in parsing.fragment_fromstring(shown).iter("tr")}


def test_a_record_shows_its_outcome_what_was_dropped_and_each_bound_beside_its_limit(results):
    record = results[0].audit
    shown = rows(record._repr_html_())
    assert "pruned" in record._repr_html_()
    assert shown["dropped"] == ", ".join(record.dropped_ids)
    for audit in record.trial.audits:
        assert f"{max(audit.upper):.3f}, limit {audit.limit:g}" in shown[f"audit {audit.observer}"]
        assert shown[f"audit {audit.observer}"].endswith("pass")


def test_a_record_of_a_full_answer_shows_why(results):
    record = results[1].audit
    assert rows(record._repr_html_()) == {"reason": record.reason.message}


def test_an_answer_is_shown_as_text_whatever_it_is(results):
    answer = "<script>alert(1)</script> & <img src=x onerror=alert(1)>"
    result = results[0].model_copy(update={"answer": answer})
    page = parsing.fragment_fromstring(result._repr_html_())
    assert not page.xpath("//script|//img")
    assert rows(result._repr_html_())["answer"] == answer
    assert len(result._repr_html_()) < 5000
    assert "\n" not in repr(result)
    assert len(repr(result)) < 200
