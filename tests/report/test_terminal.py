"""A record in the terminal: everything is there, in words, and nothing of a stranger's steers the terminal."""

import io

import pytest
from rich.console import Console

from entroprefill_rag import Chunk
from entroprefill_rag.record import (
    AuditRecord,
    AuditResult,
    ChunkInfo,
    Claims,
    DecodeMonitor,
    LayerTrial,
    ModelInfo,
    PromptInfo,
    Reason,
    Timings,
    Usage,
)
from entroprefill_rag.report.sources import sources_of
from entroprefill_rag.report.terminal import audit_panel, dropped_texts, layers_table, record_report, sources_table

HOSTILE = "\x1b[31m[bold red]:boom: \x9b2J\x07evil"


def result(observer="suffix_rows", method="enumerate", upper=(0.1, 0.14), accepted=True):
    return AuditResult(
        observer=observer,
        method=method,
        bound="exact" if method == "enumerate" else "kl",
        m=17,
        limit=0.15,
        level=None,
        eta_hat=upper,
        upper=upper,
        passed=tuple(value <= 0.15 for value in upper),
        accepted=accepted,
    )


def trial(layer=4, **more):
    fields = {
        "layer": layer,
        "doc_mass": 0.321,
        "eligible_heads": 2,
        "fallback_groups": 0,
        "head_weights": (0.5, 0.5),
        "pooled_mass": (0.6, 0.1, 0.3),
        "removed": (1,),
        "tokens_saved": 30,
        "saved_share": 0.3,
        "max_discarded": 0.25,
        "cap_slack": 0.05,
        "audits": (result(), result("prompt_rows", "sample")),
        "verdict": Reason(code="accepted", message="Passed."),
    }
    return LayerTrial(**{**fields, **more})


def record(**more):
    spans = ((10, 50, "protected by the caller"), (50, 80, None), (80, 110, None))
    chunks = tuple(
        ChunkInfo(id=f"d.md#{i}", start=start, end=end, protected=why, kept=i != 1)
        for i, (start, end, why) in enumerate(spans)
    )
    fields = {
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {},
        "model": ModelInfo(
            name="tiny",
            family="llama",
            dtype="float32",
            device="cpu",
            kernel="sdpa",
            layers=8,
            query_heads=2,
            kv_heads=1,
            fingerprint="f",
        ),
        "prompt": PromptInfo(
            hash="h", tokens=130, chunks=chunks, sink_tokens=4, suffix=(110, 130), not_admitted=("d.md#9",)
        ),
        "config": {"eps_row": 0.3},
        "layers": (2, 4),
        "trials": (trial(2, verdict=Reason(code="audit_failed", message="Audit failed."), removed=()), trial()),
        "outcome": "pruned",
        "accepted_layer": 4,
        "reason": Reason(code="accepted", message="Passed."),
        "tokens_removed": 30,
        "claims": Claims(exact="E.", probabilistic="P.", conditional="C.", not_claimed=("speed",), warnings=("W.",)),
    }
    return AuditRecord(**{**fields, **more})


BYPASS = {
    "outcome": "bypassed",
    "accepted_layer": None,
    "tokens_removed": 0,
    "trials": (),
    "reason": Reason(code="no_layer_accepted", message="No layer passed its audit."),
    "claims": Claims(),
}
CHUNKS = (
    Chunk(id="d.md#0", text="zero", title="Valves", metadata={"path": "d.md", "score": 0.75}),
    Chunk(id="d.md#1", text="one " * 100, title="Pumps", metadata={"path": "d.md", "score": 0.5}),
)


def shown(renderable, width=140, **console):
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False, **console).print(renderable)
    return out.getvalue()


def line_with(text, word):
    return next(line for line in text.splitlines() if word in line)


def test_what_ranked_the_chunks_stands_beside_the_attention_where_it_is_another_thing():
    pooled = record(trials=(trial(evidence=(0.25, 0.05, 0.7)),))
    assert [source.evidence for source in sources_of(pooled)] == [0.25, 0.05, 0.7, None]
    told = shown(sources_table(sources_of(pooled)))
    assert "70%" in line_with(told, "d.md#2")
    assert "evidence" in told
    assert "evidence" not in shown(sources_table(sources_of(record())))


def test_sources_are_in_prompt_order_with_what_became_of_them():
    sources = sources_of(record(), CHUNKS)
    assert [(source.number, source.status) for source in sources] == [
        (1, "protected"),
        (2, "dropped"),
        (3, "kept"),
        (None, "not admitted"),
    ]
    assert [source.tokens for source in sources] == [40, 30, 30, None]
    assert [source.mass_share for source in sources][:3] == pytest.approx([0.6, 0.1, 0.3])
    assert (sources[0].title, sources[0].path, sources[0].score) == ("Valves", "d.md", 0.75)
    assert (sources[2].title, sources[2].path, sources[2].score) == ("", None, None)


def test_the_table_shows_title_path_status_tokens_score_and_attention():
    text = shown(sources_table(sources_of(record(), CHUNKS)))
    for part in ("2", "Pumps", "d.md", "dropped", "30", "0.50", "10%"):
        assert part in line_with(text, "Pumps")
    assert "d.md#2" in text


def test_columns_that_nothing_is_known_for_are_left_out():
    text = shown(sources_table(sources_of(record(**BYPASS))))
    assert "score" not in text
    assert "attention" not in text


def test_the_panel_has_the_layer_the_masses_the_worst_head_the_caps_the_tokens_and_the_times():
    usage = Usage(prompt_tokens=130, kept_tokens=100, generated_tokens=20)
    text = shown(audit_panel(record(), usage, Timings(shallow=1.0, deep=0.5, rule=0.25, decode=2.0)))
    assert "audit: pruned" in text
    assert "1 of 3 chunks, 30 of 100 chunk tokens (30%), after layer 4 of 8" in text
    assert "0.321 of the attention at layer 4" in text
    assert "0.250 discarded in the worst head and row (at most 0.3 allowed, closest 0.050 below its cap)" in text
    assert "suffix_rows: worst head 1 is 0.140, limit 0.15 (exact mean over 17 rows): pass" in text
    assert "prompt_rows: worst head 1 is at most 0.140, limit 0.15 (kl bound from 17 draws): pass" in text
    assert "130 in the prompt, 100 above layer 4; 20 generated" in text
    assert "first token 1.75 s (prefill 1.50, rule and audit 0.25), decoding 2.00 s, 10 tokens/s" in text


def test_a_failed_audit_says_fail():
    failed = trial(audits=(result(upper=(0.1, 0.4), accepted=False),))
    text = shown(audit_panel(record(**{**BYPASS, "trials": (failed,)})))
    assert "worst head 1 is 0.400, limit 0.15 (exact mean over 17 rows): fail" in text


def test_a_bypass_gives_its_reason_in_words():
    text = shown(audit_panel(record(**BYPASS)))
    assert "audit: bypassed" in text
    assert "No layer passed its audit." in text


def test_caps_of_their_own_for_each_row_are_said_to_be():
    assert "one cap a row" in shown(audit_panel(record(config={"eps_row": [0.3, 0.2]})))


def test_the_layers_table_has_a_line_and_a_verdict_for_each_layer():
    text = shown(layers_table(record()))
    assert "Audit failed." in line_with(text, " 2 ")
    for part in ("0.321", "30 (30%)", "0.250 / 0.3", "0.140 / 0.15", "Passed."):
        assert part in line_with(text, " 4 ")


def test_a_report_labels_each_claim_by_its_strength():
    text = shown(record_report(record(), CHUNKS))
    for label, claim in (("exact", "E."), ("probabilistic", "P."), ("conditional", "C."), ("not claimed", "speed")):
        assert any(line.startswith(label) and claim in line for line in text.splitlines())
    assert "note: W." in text
    assert "none: nothing was removed" in shown(record_report(record(**BYPASS)))


def test_dropped_texts_show_how_each_begins_and_no_more():
    text = shown(dropped_texts(record(), CHUNKS))
    assert "Pumps" in text
    assert 40 < text.count("one") < 70
    assert "zero" not in text
    assert "not in the record" in shown(dropped_texts(record(), ()))
    assert "nothing" in shown(dropped_texts(record(prompt=PromptInfo(**{**dict(record().prompt), "chunks": ()})), ()))


def test_text_of_strangers_is_printed_as_it_reads_and_steers_nothing():
    chunks = tuple(
        Chunk(id=f"d.md#{i}", text=HOSTILE, title=HOSTILE + "\n" * 50, metadata={"path": HOSTILE}) for i in range(2)
    )
    told = Claims(exact=HOSTILE, not_claimed=(HOSTILE,), warnings=(HOSTILE,))
    hostile = record(claims=told, reason=Reason(code="x", message=HOSTILE))
    text = shown(record_report(hostile, chunks)) + shown(dropped_texts(hostile, chunks))
    text += shown(audit_panel(record(**{**BYPASS, "reason": Reason(code="x", message=HOSTILE)})))
    assert "[bold red]:boom: evil" in text
    assert not {"\x1b", "\x9b", "\x07"} & set(text)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_any_width_will_do(width):
    usage = Usage(prompt_tokens=130, kept_tokens=100, generated_tokens=20)
    text = shown(record_report(record(), CHUNKS), width) + shown(audit_panel(record(), usage, Timings()), width)
    assert max(map(len, text.splitlines())) <= width


def test_a_record_with_text_needs_no_request():
    chunks = tuple(
        info.model_copy(update={"text": "kept text", "title": f"Title {i}"})
        for i, info in enumerate(record().prompt.chunks)
    )
    full = record(prompt=record().prompt.model_copy(update={"chunks": chunks}))
    assert "Title 1" in shown(sources_table(sources_of(full)))
    assert "kept text" in shown(dropped_texts(full, ()))


def decoding_shown(**fields):
    values = {"layer": 4, "threshold": 0.2, "on_drift": "record", "tokens": 3, "max_per_token": (0.05, 0.123, 0.01)}
    seen = DecodeMonitor(**{**values, "mean": 0.0312, **fields})
    out = io.StringIO()
    Console(file=out, width=300).print(audit_panel(record().model_copy(update={"decode": seen})))
    return " ".join(out.getvalue().split())


def test_the_largest_mass_its_token_the_mean_and_the_threshold_are_named():
    assert (
        "decoding largest mass on removed chunks 0.123 (token 2 of 3), mean 0.0312, threshold 0.2 not exceeded"
        in decoding_shown()
    )


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("none", 'looks back at what was dropped; nothing was done about it (on_drift="restart_full"'),
        ("stopped", "threshold 0.1; EXCEEDED at token 2: the answer looks back at what was dropped; the answer ends"),
        ("restarted_full", "EXCEEDED at token 2: the answer looks back at what was dropped; it was answered again in"),
    ],
)
def test_a_drift_and_what_was_done_is_named(action, says):
    assert says in decoding_shown(threshold=0.1, first_above=1, action=action)


def test_without_a_row_and_without_a_monitor_nothing_is_made_up():
    assert "no generated token was fed back" in decoding_shown(tokens=0, max_per_token=(), mean=0.0)
    out = io.StringIO()
    Console(file=out, width=300).print(audit_panel(record()))
    assert "decoding" not in out.getvalue()
