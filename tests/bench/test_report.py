"""The report from made-up rows: what is counted, what is tested, and that nothing of a stranger's gets out."""

import re

import pytest

from entroprefill_rag.bench.plot import quality_svg
from entroprefill_rag.bench.report import html, markdown, to_json, write
from entroprefill_rag.bench.rows import Row, Store
from entroprefill_rag.bench.summary import summarise
from entroprefill_rag.errors import RecordError

STAMP = {"model": "m", "dtype": "float32", "seed": 0}
RUN = {
    "command": "entroprefill bench --out x",
    "stamp": STAMP,
    "methods": {"full": {"what": "all", "origin": "a|b"}, "ours": {"what": "less", "origin": "us", "settings": "new"}},
    "not_run": [{"name": "llmlingua", "reason": "<b>absent</b>"}],
    "notes": ["A note."],
    "complete": True,
}


def row(number, method, **more):
    told = {
        "stamp": STAMP,
        "settings": "new",
        "question": f"q{number}",
        "set": "red" if number % 2 else "blue",
        "method": method,
        "place": 0,
        "chunks": 10,
        "gold": 1,
        "found": True,
        "f1": 0.5,
        "declines": False,
        "need_met": True,
        "kept": 10,
        "kept_share": 1.0,
        "gold_kept": 1,
        "seconds": {"select": 0.0, "shallow": 2.0},
        "ttft": 2.0,
        "total": 3.0,
        "token_layers": 100,
        "kv_bytes": 1000,
        "prompt_tokens": 50,
        "generated_tokens": 3,
    }
    return Row(**(told | more))


def pruned(number, **more):
    told = {"outcome": "pruned", "layer": 5, "reason": "accepted", "verdicts": {"accepted": 1}, "kept": 5}
    return row(number, "ours", **(told | {"ttft": 1.0, "token_layers": 50, "kept_share": 0.5} | more))


@pytest.fixture
def rows():
    made = [row(i, "full") for i in range(32)] + [pruned(i) for i in range(31)]
    made.append(row(31, "ours", status="failed", message="KeyError: <script>x</script> | y", found=None, f1=None))
    return made


@pytest.fixture
def summary(rows):
    return summarise(rows, RUN)


def method(summary, name):
    return next(one for one in summary["methods"] if one["name"] == name)


def test_failures_are_counted_and_not_averaged(summary):
    ours = method(summary, "ours")
    assert (ours["n"], ours["failed"]) == (31, 1)
    assert ours["failures"][0]["count"] == 1
    assert ours["found"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 31}
    assert summary["questions"] == {"blue": 16, "red": 16}


def test_comparisons_are_paired_with_the_full_run(rows):
    rows[3] = rows[3].model_copy(update={"found": False})
    rows[35] = rows[35].model_copy(update={"f1": 0.0})
    ours = method(summarise(rows, RUN), "ours")
    assert ours["paired"]["found"]["mean"] == pytest.approx(1 / 31, rel=1e-3)
    assert ours["paired"]["f1"]["mean"] == pytest.approx(-0.5 / 31, rel=1e-3)
    assert ours["speedup"]["mean"] == pytest.approx(2.0)
    assert ours["work"]["mean"] == pytest.approx(0.5)


def test_a_layer_is_tested_from_thirty_requests_on(rows):
    chance = method(summarise(rows, RUN), "ours")["decision"]["chance"]
    assert chance["layers"]["5"]["requests"] == 31
    assert chance["layers"]["5"]["p"] == pytest.approx(0.5**31, rel=1e-3)
    rows[32] = pruned(0, layer=6)
    rows[33] = pruned(1, layer=6)
    decision = method(summarise(rows, RUN), "ours")["decision"]
    assert decision["layers"] == {"5": 29, "6": 2}
    assert decision["chance"]["layers"] == {}
    assert decision["chance"]["all"]["requests"] == 31


def test_bypassed_requests_and_their_reasons_are_shown(rows):
    rows[32] = pruned(0, outcome="bypassed", layer=None, reason="no_layer_accepted", verdicts={"audit_failed": 3})
    summary = summarise(rows, RUN)
    decision = method(summary, "ours")["decision"]
    assert decision["accepted"]["mean"] == pytest.approx(30 / 31, rel=1e-3)
    assert decision["verdicts"] == {"accepted": 30, "audit_failed": 3}
    assert "accepted: 30, no_layer_accepted: 1" in markdown(summary, "p.svg")


def test_rows_of_settings_that_have_changed_are_left_out(rows):
    old = pruned(0).model_copy(update={"settings": "old", "found": False})
    assert summarise([*rows, old], RUN) == summarise(rows, RUN)


def test_no_answer_behaviour_is_told_apart(rows):
    rows[32] = pruned(0, answerable=False, found=None, f1=None, need_met=None, gold=0, gold_kept=0, declines=True)
    ours = method(summarise(rows, RUN), "ours")
    assert ours["declines"]["unanswerable"]["mean"] == 1.0
    assert ours["declines"]["answerable"]["mean"] == 0.0
    assert ours["found"]["n"] == 30


def test_markdown_tables_are_whole_and_escaped(summary):
    text = markdown(summary, "quality.svg")
    assert "<script>" not in text
    assert "<b>" not in text
    assert "a\\|b" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) >= 8
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_the_page_escapes_everything_and_loads_nothing(summary):
    page = html(summary, quality_svg(summary))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;absent" in page
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!#)', page)


def test_the_plot_is_the_same_for_the_same_numbers(summary):
    first = quality_svg(summary)
    assert first == quality_svg(summary)
    assert first.startswith("<?xml")


def test_methods_that_did_not_run_are_named_with_the_reason(summary):
    assert "Not run: llmlingua: &lt;b>absent" in markdown(summary, "x")


def test_peak_memory_is_a_column_only_where_it_was_measured(rows):
    assert "peak, MB" not in markdown(summarise(rows, RUN), "x")
    rows[0] = rows[0].model_copy(update={"peak_bytes": 5_000_000})
    assert "peak, MB" in markdown(summarise(rows, RUN), "x")


def test_files_are_written_beside_the_rows_and_into_the_documentation(tmp_path, rows):
    store = Store(tmp_path / "run")
    store.append(rows)
    store.save_run(RUN)
    docs = tmp_path / "docs"
    docs.mkdir()
    write(store, docs)
    assert (docs / "benchmark.md").read_text() == markdown(summarise(rows, RUN), "benchmark/quality.svg")
    assert (docs / "benchmark" / "summary.json").read_text() == to_json(summarise(rows, RUN))
    assert (docs / "benchmark" / "quality.svg").read_text() == (store.folder / "quality.svg").read_text()


def test_a_run_without_rows_is_refused():
    with pytest.raises(RecordError, match="no row to report"):
        summarise([], RUN)


def test_methods_are_paired_with_the_embedder_where_it_ran(summary, rows):
    assert method(summary, "ours")["beside"] is None
    met = [row(i, "embedder", ttft=0.5, need_met=i < 10) for i in range(31)]
    ours = method(summarise([*rows, *met], RUN), "ours")["beside"]
    assert ours["need_met"]["mean"] == pytest.approx(21 / 31, rel=1e-3)
    assert ours["speedup"]["mean"] == pytest.approx(0.5)
    page = markdown(summarise([*rows, *met], RUN), "x")
    assert "| ours | +0.00 [+0.00, +0.00] | +0.00 [+0.00, +0.00] | +0.68 [" in page
