"""A record as a page: all of it is there, nothing is loaded, and nothing of a stranger's becomes markup."""

import itertools
import re
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree
from lxml import html as parsing

from entroprefill_rag import Chunk, LocalBackend, RagRequest
from entroprefill_rag.record import AuditRecord
from entroprefill_rag.report.html import html_report, number
from entroprefill_rag.report.terms import TERMS

ROOT = Path(__file__).parent.parent.parent
SECTIONS = ["prompt", "layers", "heads", "audit", "dual", "decode", "claims", "more"]
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\" onload='x' {{ 7 * 7 }} \u202egnp.\x1b[31m"
SETTINGS = {
    "pruned": {},
    "bypassed": {"eps_row": 1e-6},
    "off": {"enabled": False},
}


@pytest.fixture(scope="module")
def backend():
    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as made:
        yield made


@pytest.fixture(scope="module")
def records(backend):
    """A real record of each outcome."""
    made = {}
    for outcome, settings in SETTINGS.items():
        config = tiny.LOOSE.model_copy(update=settings)
        made[outcome] = backend.generate(tiny.request(), config, max_new_tokens=4, do_sample=False).audit
        assert made[outcome].outcome == outcome
    made["no chunks"] = backend.generate(RagRequest(query="What?"), tiny.LOOSE, max_new_tokens=2).audit
    return made


KINDS = [*SETTINGS, "no chunks"]


def parsed(page):
    return parsing.document_fromstring(page)


def text_of(node):
    return " ".join(node.text_content().split())


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_well_formed(records, kind):
    parser = etree.HTMLParser()
    etree.fromstring(html_report(records[kind]), parser)
    # libxml2 may not know the elements of HTML 5; everything else that it notes is a fault.
    faults = [str(error) for error in parser.error_log if not re.search(r"Tag \w+ invalid", error.message)]
    assert faults == []
    ids = parsed(html_report(records[kind])).xpath("//@id")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_every_section_is_there_and_says_something(records, kind):
    page = parsed(html_report(records[kind]))
    assert page.xpath("//h2/@id") == SECTIONS
    for section in page.xpath("//section"):
        heading = page.get_element_by_id(section.get("aria-labelledby"))
        assert len(text_of(section)) > len(text_of(heading)) + 20
    assert records[kind].reason.message in text_of(page)


def test_what_ranked_the_chunks_is_shown_where_evidence_ranked_them(records):
    base = records["pruned"]
    count = len(base.prompt.chunks)
    shares = tuple((i + 1) / (count * (count + 1) / 2) for i in range(count))
    trials = tuple(one.model_copy(update={"evidence": shares}) for one in base.trials)
    told = text_of(parsed(html_report(base.model_copy(update={"trials": trials}))))
    assert "It ranked the chunks" in told
    assert f"{shares[-1]:.0%}" in told
    assert "It ranked the chunks" not in text_of(parsed(html_report(base)))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_loaded_and_nothing_runs(records, kind):
    source = html_report(records[kind])
    page = parsed(source)
    assert not page.xpath("//script|//link|//img|//image|//iframe|//object|//embed|//use|//base|//form|//input")
    assert not page.xpath("//@src|//@srcset|//@data|//@action|//@style|//@*[starts-with(name(), 'on')]")
    assert not re.search(r"https?:|url\(|@import|javascript:", source)
    policy = page.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]


def test_links_are_relative_and_lead_to_headings_that_exist(records):
    links = {term.href for term in TERMS.values()} | set(parsed(html_report(records["pruned"])).xpath("//a/@href"))
    for link in links:
        name, _, anchor = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.M)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, link


def test_text_of_strangers_stays_text(records):
    base = records["pruned"]
    chunks = tuple(info.model_copy(update={"id": f"{HOSTILE}{i}"}) for i, info in enumerate(base.prompt.chunks))
    prompt = base.prompt.model_copy(
        update={"chunks": chunks, "notes": (HOSTILE,), "query": HOSTILE, "not_admitted": (HOSTILE,)}
    )
    hostile = base.model_copy(
        update={
            "prompt": prompt,
            "answer": HOSTILE,
            "created": HOSTILE,
            "model": base.model.model_copy(update={"name": HOSTILE, "revision": HOSTILE, "kernel": HOSTILE}),
            "config": {HOSTILE: HOSTILE, "audit": {"x": [HOSTILE]}},
            "versions": {HOSTILE: HOSTILE},
            "reason": base.reason.model_copy(update={"code": HOSTILE, "message": HOSTILE}),
            "claims": base.claims.model_copy(
                update={"exact": HOSTILE, "not_claimed": (HOSTILE,), "warnings": (HOSTILE,)}
            ),
            "trials": tuple(
                trial.model_copy(
                    update={
                        "verdict": trial.verdict.model_copy(update={"code": HOSTILE, "message": HOSTILE}),
                        "audits": tuple(one.model_copy(update={"observer": HOSTILE}) for one in trial.audits),
                    }
                )
                for trial in base.trials
            ),
        }
    )
    known = [Chunk(id=info.id, text=HOSTILE, title=HOSTILE, metadata={"path": HOSTILE}) for info in chunks]
    for source in (html_report(hostile, known), hostile._repr_html_()):
        page = parsed(source)
        assert not page.xpath("//script|//img|//@onload|//@onerror")
        assert "<script>alert(1)</script>" in page.text_content()
        assert "{{ 7 * 7 }}" in page.text_content()
    page = html_report(hostile, known)
    assert not {"\u202e", "\x1b"} & set(page)
    assert [element.tag for element in parsed(page).xpath("//head/*")].count("title") == 1


def test_dropped_chunks_are_told_apart_without_colour(records):
    record = records["pruned"]
    page = parsed(html_report(record))
    states = page.xpath("//section[@aria-labelledby='prompt']//tbody/tr/td[3]")
    assert [text_of(state) == "dropped" for state in states] == [not info.kept for info in record.prompt.chunks]
    strip = page.xpath("//section[@aria-labelledby='prompt']/svg")[0]
    assert len(strip.xpath(".//line")) == len(record.dropped_ids)
    told = [title.text for title in strip.xpath(".//g/title")]
    assert [": dropped, " in one for one in told] == [not info.kept for info in record.prompt.chunks]


def test_the_strip_covers_the_prompt_by_length(records):
    record = records["pruned"]
    strip = parsed(html_report(record)).xpath("//section[@aria-labelledby='prompt']/svg")[0]
    spans = [
        (float(rect.get("x")[:-1]), float(rect.get("width")[:-1]))
        for rect in strip.xpath(".//rect[contains(@class, 'mass') or contains(@class, 'other')]")
    ]
    assert sum(width for _, width in spans) == pytest.approx(100, abs=0.1)
    for (left, width), (after, _) in itertools.pairwise(spans):
        assert after == pytest.approx(left + width, abs=0.01)


def test_the_heat_map_has_a_cell_for_each_chunk_of_each_layer_stronger_where_the_mass_is_larger(records):
    record = records["pruned"]
    page = parsed(html_report(record))
    cells = page.xpath("//section[@aria-labelledby='layers']/svg//rect[@class='mass']")
    masses = [mass for trial in record.trials for mass in trial.pooled_mass]
    assert len(cells) == len(masses) == len(record.trials) * len(record.prompt.chunks)
    opacity = [float(cell.get("fill-opacity")) for cell in cells]
    order = sorted(range(len(masses)), key=masses.__getitem__)
    assert [opacity[i] for i in order] == sorted(opacity)
    assert max(opacity) == 1
    assert min(opacity) > 0


def test_heads_come_by_weight_and_every_audit_has_every_head(records):
    record = records["pruned"]
    page = parsed(html_report(record))
    rows = page.xpath("//section[@aria-labelledby='heads']//tbody/tr")
    weights = record.trial.head_weights
    assert [int(text_of(row[0])) for row in rows] == sorted(range(len(weights)), key=lambda head: -weights[head])
    tables = page.xpath("//section[@aria-labelledby='audit']//table")
    assert len(tables) == len(record.trial.audits) == 2
    for table, audit in zip(tables, record.trial.audits, strict=True):
        seen = [[text_of(cell) for cell in row] for row in table.xpath("./tbody/tr")]
        assert [row[2:4] for row in seen] == [
            [number(mean), number(upper)] for mean, upper in zip(audit.eta_hat, audit.upper, strict=True)
        ]
        assert [row[5] for row in seen] == ["pass" if passed else "fail" for passed in audit.passed]


def test_claims_stand_under_the_word_for_their_strength(records):
    record = records["pruned"]
    section = parsed(html_report(record)).xpath("//section[@aria-labelledby='claims']")[0]
    blocks = {text_of(block[0]): text_of(block) for block in section.xpath("./div")}
    assert list(blocks) == ["Exact", "Probabilistic", "Conditional", "Not claimed"]
    assert record.claims.exact in blocks["Exact"]
    assert record.claims.conditional in blocks["Conditional"]
    assert all(one in blocks["Not claimed"] for one in record.claims.not_claimed)
    off = parsed(html_report(records["off"])).xpath("//section[@aria-labelledby='claims']/div")
    assert [text_of(block).endswith("Nothing.") for block in off] == [True, True, True, False]


def test_every_number_explains_itself_on_hover_and_on_tap(records):
    page = parsed(html_report(records["pruned"]))
    facts = page.xpath("//details[contains(@class, 'fact')]")
    assert len(facts) > 12
    for fact in facts:
        assert fact.get("title") in text_of(fact.xpath("./p")[0])
    for table in page.xpath("//table[thead/tr/th[@title]]"):
        unexplained = table.xpath("./tbody/tr/td[contains(@class, 'n') and not(@title)]")
        assert all(cell.getprevious() is None or cell.getnext() is not None for cell in unexplained)
    for image in page.xpath("//svg[not(@aria-hidden)]"):
        assert image.get("role") == "img"
        assert image.get("aria-label")


def test_a_record_without_text_shows_ids_and_one_with_text_shows_it(backend, records):
    assert "c1" in text_of(parsed(html_report(records["pruned"])))
    assert "word11" not in html_report(records["pruned"])
    config = tiny.LOOSE.model_copy(update={"include_text": True})
    full = backend.generate(tiny.request(), config, max_new_tokens=4, do_sample=False)
    page = text_of(parsed(html_report(full.audit)))
    for part in ("word11", "title 1", tiny.request().query):
        assert part in page
    assert "title 1" in text_of(parsed(html_report(records["pruned"], tiny.request().chunks)))


def test_a_long_answer_is_drawn_in_few_bars_and_no_peak_is_lost(records):
    record = records["pruned"]
    values = (0.01,) * 1500 + (0.9,) + (0.01,) * 500
    seen = record.decode.model_copy(
        update={"max_per_token": values, "tokens": len(values), "threshold": 0.5, "first_above": 1500}
    )
    bars = parsed(html_report(record.model_copy(update={"decode": seen}))).xpath(
        "//section[@aria-labelledby='decode']/svg/rect"
    )
    assert len(bars) <= 300
    assert [bar[0].text for bar in bars if bar.get("class") == "over"] == ["tokens 1499 to 1505, largest: 0.900"]


@given(st.floats(0, 1e6, allow_subnormal=False))
def test_a_number_that_is_not_zero_does_not_read_as_zero_and_is_near_what_is_shown(value):
    shown = float(number(value).replace(",", ""))
    assert (shown > 0) == (value > 0)
    assert shown == pytest.approx(value, abs=0.0501 if value >= 10 else 0.000501)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_comes_from_a_record_read_back_as_from_the_record(records, kind):
    assert html_report(AuditRecord.from_json(records[kind].to_json())) == html_report(records[kind])
