"""The page in a real browser: ask, stream, toggle, upload, errors, a phone's screen, the keyboard.

Needs Playwright and a Chromium; skipped where either is missing.
"""

import itertools
import os
import re
import shutil

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("ENTROPREFILL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install chromium, or set ENTROPREFILL_CHROMIUM"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser, served):
    """A ready page; every complaint of the browser's console fails the test, but for those it expects."""
    opened = []

    def open_(*, width=1100, height=800, dark=False, expected=(), **changed):
        address, _ = served(**changed)
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", accept_downloads=True)
        page = context.new_page()
        page.set_default_timeout(20_000)
        complaints = []
        page.on("console", lambda told: complaints.append(told.text) if told.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        opened.append((context, complaints, expected, requests, address))
        return page

    yield open_
    for context, complaints, expected, requests, address in opened:
        context.close()
        assert [text for text in complaints if not any(part in text for part in expected)] == []
        assert all(url.startswith(address) for url in requests)


def ask(page, question="bees?"):
    page.get_by_label("Question about the documents").fill(question)
    page.get_by_role("button", name="Ask").click()
    sync_api.expect(page.locator("#progress")).to_have_text("The answer is complete")


def test_a_question_gets_an_answer_cards_and_an_audit(open_page):
    page = open_page()
    ask(page)
    assert page.locator("#pruned").inner_text().strip()
    assert "First token" in page.locator("#pruned-times").inner_text()
    cards = page.locator("#sources li")
    assert cards.count() == 5
    states = cards.locator(".state").all_inner_texts()
    assert {"kept", "dropped"} <= set(states)
    assert [text.split("]")[0] for text in cards.locator("h3").all_inner_texts()] == [f"[{n}" for n in range(1, 6)]
    rows = page.locator("#audit tbody tr")
    assert rows.count() == 2
    assert "accepted" in rows.nth(0).inner_text()
    assert "not reached" in rows.nth(1).inner_text()
    assert "Exact." in page.locator("#claims").inner_text()


def test_bars_are_as_long_as_their_numbers(open_page):
    page = open_page()
    ask(page)
    for item in page.locator("#sources li").all():
        share = int(item.inner_text().split("attention ")[1].split("%")[0])
        whole, part = (
            item.locator(name).evaluate("e => e.getBoundingClientRect().width") for name in (".bar", ".bar i")
        )
        assert part / whole == pytest.approx(share / 100, abs=0.02)


def test_streaming_moves_nothing_below_it(open_page):
    page = open_page(max_new_tokens=600)
    page.get_by_label("Question about the documents").fill("bees?")
    page.get_by_role("button", name="Ask").click()
    page.locator("#sources li").first.wait_for()

    def places():
        return [page.locator(name).bounding_box()["y"] for name in ("#sources-title", "#audit-title")]

    before, length = places(), 0
    while page.locator("#stop").is_enabled():
        assert places() == before
        assert page.locator("#pruned").evaluate("e => e.textContent.length") >= length
        length = page.locator("#pruned").evaluate("e => e.textContent.length")
    assert length > 300
    assert places()[0] == before[0]


def test_the_answer_without_pruning_stands_beside_it_with_both_times(open_page):
    page = open_page()
    ask(page)
    page.get_by_label("Compare without pruning").check()
    sync_api.expect(page.locator("#comparison")).to_contain_text("The answers")
    assert "First token" in page.locator("#full-times").inner_text()
    left, right = page.locator("#pruned").bounding_box(), page.locator("#full").bounding_box()
    assert left["y"] == right["y"]
    page.get_by_label("Compare without pruning").uncheck()
    assert page.locator("#full").is_hidden()


def test_an_answer_can_be_stopped_and_the_next_one_asked(open_page):
    page = open_page(max_new_tokens=1000)
    page.get_by_label("Question about the documents").fill("bees?")
    page.get_by_role("button", name="Ask").click()
    sync_api.expect(page.locator("#pruned")).to_have_text(re.compile(r".{6,}", re.DOTALL))
    page.get_by_role("button", name="Stop", exact=True).click()
    sync_api.expect(page.locator("#progress")).to_have_text("Stopped")
    sync_api.expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    page.get_by_role("button", name="Ask").click()
    sync_api.expect(page.locator("#pruned")).to_have_text(re.compile(r".{6,}", re.DOTALL))
    page.get_by_role("button", name="Stop", exact=True).click()


def test_documents_are_uploaded_asked_and_removed(open_page, tmp_path):
    page = open_page(expected=("400",))
    (tmp_path / "owls.md").write_text("# Owls\n\nOwls howl. <b onclick=alert(1)>wow</b>")
    (tmp_path / "bad.pdf").write_bytes(b"no pdf")
    page.get_by_label("Add documents").set_input_files([tmp_path / "owls.md", tmp_path / "bad.pdf"])
    sync_api.expect(page.locator("#upload-progress")).to_have_text("1 of 2 added")
    assert "bad.pdf: bad.pdf cannot be read" in page.locator("#upload-error").inner_text()
    assert "owls.md: 1 chunk" in page.locator("#uploaded").inner_text()
    ask(page, "owls howl wow")
    card = page.locator("#sources li", has_text="owls.md")
    card.locator("summary").click()
    assert "<b onclick=alert(1)>wow</b>" in card.locator("pre").inner_text()
    assert page.locator("#sources b").count() == page.locator("#sources .bar b").count()
    page.get_by_role("button", name="Remove owls.md").click()
    sync_api.expect(page.locator("#uploaded li")).to_have_count(0)


def test_errors_are_shown_where_they_arise(open_page):
    page = open_page(folder=None, expected=("400",))
    page.get_by_label("Question about the documents").fill("bees?")
    page.get_by_role("button", name="Ask").click()
    sync_api.expect(page.locator("#ask-error")).to_contain_text("upload one below")
    sync_api.expect(page.get_by_role("button", name="Ask")).to_be_enabled()


def test_a_server_that_is_gone_is_said(open_page):
    page = open_page(expected=("ERR_",))
    ask(page)
    page.route("**/api/ask", lambda route: route.abort())
    page.get_by_role("button", name="Ask").click()
    sync_api.expect(page.locator("#ask-error")).to_contain_text("is it still running?")


def test_record_and_report_can_be_saved_and_the_report_opened(open_page, browser, tmp_path):
    page = open_page()
    ask(page)
    for name, file in (("Download the record", "record.json"), ("Download the report", "report.html")):
        with page.expect_download() as found:
            page.get_by_role("link", name=name).click()
        found.value.save_as(tmp_path / file)
    from entroprefill_rag.record import AuditRecord

    assert AuditRecord.load(tmp_path / "record.json").outcome == "pruned"
    other = browser.new_page()
    other.goto((tmp_path / "report.html").as_uri())
    assert other.locator("h1").inner_text().startswith("Pruned")
    other.close()


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(open_page, dark):
    page = open_page(width=360, height=740, dark=dark)
    ask(page)
    page.get_by_label("Compare without pruning").check()
    sync_api.expect(page.locator("#comparison")).to_contain_text("The answers")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#audit td[data-label]").first.is_visible()
    below = page.locator("#full").bounding_box()["y"] > page.locator("#pruned").bounding_box()["y"]
    assert below
    for button in page.get_by_role("button").all():
        if button.is_visible():
            assert button.bounding_box()["height"] >= 32


def test_it_can_be_used_by_keyboard_alone(open_page):
    page = open_page()
    sync_api.expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    page.keyboard.press("Tab")
    page.keyboard.type("bees?")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#progress")).to_have_text("The answer is complete")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"go", "compare", "pruned", "SUMMARY", "record", "report", "files"} <= reached


def test_everything_to_use_has_a_name_for_a_screen_reader(open_page):
    page = open_page()
    ask(page)
    nameless = page.evaluate(
        """[...document.querySelectorAll('input, textarea, button, a, table, [role=region], section')].filter(e =>
        e.checkVisibility() && !(e.labels && e.labels.length) && !e.getAttribute('aria-label') &&
        !e.getAttribute('aria-labelledby') && !e.textContent.trim()).map(e => e.outerHTML)"""
    )
    assert nameless == []
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1])")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for name in ("#progress", "#status", "#comparison"):
        assert page.locator(name).get_attribute("role") == "status"


def test_the_token_is_asked_for_first(open_page):
    page = open_page(token="correct horse battery", expected=("401",))
    page.get_by_label("Token").fill("wrong one")
    page.get_by_role("button", name="Enter").click()
    sync_api.expect(page.locator("#login-error")).to_contain_text("not the token")
    page.get_by_label("Token").fill("correct horse battery")
    page.get_by_role("button", name="Enter").click()
    sync_api.expect(page.locator("#login")).to_be_hidden()
    ask(page)
