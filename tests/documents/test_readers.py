"""One kind of file after the other: what comes out, and what is refused with which reason."""

import io
import sys
import time
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.documents.readers import Limits, Unreadable, decode, extract

LIMITS = Limits()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_with_a_known_encoding_is_read_without_a_note(encoding):
    result = extract("Grüße, 世界".encode(encoding), "text", LIMITS)
    assert result.text == "Grüße, 世界"
    assert result.notes == ()


def test_utf16_big_endian_is_known_by_its_mark():
    assert extract(b"\xfe\xff" + "Grüße".encode("utf-16-be"), "text", LIMITS).text == "Grüße"


def test_other_encodings_are_read_with_replacements_and_a_note():
    result = extract(("words " * 20 + "café").encode("latin-1"), "text", LIMITS)
    assert result.text.endswith("caf\ufffd")
    assert result.notes == ("1 undecodable byte sequences were replaced (not valid UTF-8)",)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "empty"), (b" \n\x0c\t", "empty"), (b"abc\x00def", "binary"), (bytes(range(128, 256)), "not text in UTF-8")],
)
def test_what_is_no_text_is_refused(data, reason):
    with pytest.raises(Unreadable, match=reason):
        extract(data, "text", LIMITS)


def test_line_ends_become_newlines():
    assert extract(b"a\r\nb\rc\x0cd", "text", LIMITS).text == "a\nb\nc\n\nd"


@given(st.binary(max_size=400), st.sampled_from(["text", "markdown", "rst", "html", "csv", "pdf", "docx", "code"]))
def test_any_bytes_give_clean_text_or_a_reason(data, kind):
    try:
        result = extract(data, kind, LIMITS)
    except Unreadable:
        return
    result.text.encode()
    assert result.text.strip()
    assert not {"\x00", "\r"} & set(result.text)


@given(st.text(max_size=300))
def test_what_was_written_as_utf8_comes_back(text):
    if "\x00" not in text and not text.startswith("\ufeff"):
        assert decode(text.encode()) == (text, [])


def test_markdown_headings_name_their_parent_and_skip_code():
    source = "# Guide\n\n## Install `now`\n\n```sh\n# not a heading\n```\n\nSetext\n======\n\n#hashtag\n"
    result = extract(source.encode(), "markdown", LIMITS)
    assert [title for _, title in result.headings] == ["Guide", "Guide > Install now", "Setext"]
    assert [source[offset:].split("\n")[0] for offset, _ in result.headings] == [
        "# Guide",
        "## Install `now`",
        "Setext",
    ]


def test_rst_headings_take_their_level_from_the_order_of_marks():
    source = "=====\nTitle\n=====\n\nPart\n----\n\ntext\n\nNext\n----\n"
    headings = extract(source.encode(), "rst", LIMITS).headings
    assert [title for _, title in headings] == ["Title", "Title > Part", "Title > Next"]


def test_html_gives_visible_text_with_headings_and_cells():
    page = """<html><head><title>T</title><style>p {x}</style></head><body><script>evil()</script>
    <h2>Prices &amp; terms</h2><p>One <b>bold</b>
    word.</p><ul><li>first</li><li>second</li></ul><table><tr><td>a</td><td>b</td></tr></table>
    <pre>def f():
    return 1</pre><!-- hidden --></body></html>"""
    result = extract(page.encode(), "html", LIMITS)
    assert "One bold word." in result.text
    assert "## Prices & terms" in result.text
    assert "a | b" in result.text
    assert "def f():\n    return 1" in result.text
    assert not any(word in result.text for word in ("evil", "hidden", "p {x}"))
    assert [title for _, title in result.headings] == ["T", "T > Prices & terms"]


@pytest.mark.parametrize("bomb", ["<div>", "<!--", "<", "<a ", "<p><i><b>", "<script>"])
def test_html_that_never_closes_takes_time_linear_in_its_size(bomb):
    started = time.process_time()
    result = extract(("visible " + bomb * 100_000).encode(), "html", LIMITS)
    assert result.text.startswith("visible")
    assert time.process_time() - started < 5


def test_html_without_optional_tags_keeps_its_body():
    assert extract(b"<head><title>T</title><body>hi<p>there", "html", LIMITS).text == "# T\n\nhi\n\nthere"


def test_csv_rows_carry_their_column_names():
    result = extract(b'name,note\r\nAda,"first, line\r\nsecond"\r\nBob,\r\n', "csv", LIMITS)
    assert result.text == "name: Ada\nnote: first, line\nsecond\n\nname: Bob"


def test_csv_that_would_multiply_its_size_stays_plain():
    table = "h" * 1000 + ",b\n" + "1,2\n" * 500
    result = extract(table.encode(), "csv", LIMITS)
    assert result.text == table
    assert result.notes == ("read as plain text, not as a table",)


def pdf(*texts):
    """A PDF written by hand, one page a text."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    kids = []
    for text in texts:
        stream = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET".encode() if text else b""
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        font = b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents %d 0 R /Resources %s >>"
            % (len(objects), font)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(kids))
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    return (
        out
        + head
        + table
        + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
        % (
            len(objects) + 1,
            len(out),
        )
    )


def test_pdf_pages_become_titles():
    result = extract(pdf("first words", "second words"), "pdf", LIMITS)
    assert result.text == "first words\n\nsecond words"
    assert result.headings == ((0, "page 1"), (13, "page 2"))


def test_pdf_pages_are_limited_and_the_note_says_so():
    result = extract(pdf("one", "two", "three"), "pdf", Limits(max_pdf_pages=2))
    assert result.text == "one\n\ntwo"
    assert result.notes == ("only the first 2 of 3 pages were read",)


def test_pdf_without_text_or_sense_is_refused():
    with pytest.raises(Unreadable, match="a scan"):
        extract(pdf(""), "pdf", LIMITS)
    with pytest.raises(Unreadable, match="not a readable PDF"):
        extract(b"%PDF-1.4 nonsense", "pdf", LIMITS)


def written_docx():
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_heading("Terms", level=1)
    document.add_paragraph("Payment within 30 days.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "price", "12"
    document.add_paragraph("After the table.")
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def test_docx_gives_headings_paragraphs_and_tables_in_order():
    result = extract(written_docx(), "docx", LIMITS)
    assert result.text == "# Terms\n\nPayment within 30 days.\n\nprice | 12\n\nAfter the table."
    assert result.headings == ((0, "Terms"),)


def test_docx_bombs_are_refused_unpacked():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"\0" * 2_000_000)
    with pytest.raises(Unreadable, match="unpacks to 2000000 bytes, more than the limit of 1000000"):
        extract(file.getvalue(), "docx", Limits(max_docx_bytes=1_000_000))


def test_docx_without_sense_is_refused():
    with pytest.raises(Unreadable, match=r"not a readable \.docx"):
        extract(b"PK\x03\x04", "docx", LIMITS)


@pytest.mark.parametrize(("kind", "package"), [("pdf", "pypdf"), ("docx", "docx"), ("html", "lxml")])
def test_a_missing_reader_is_named_with_the_command(monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unreadable, match=rf"reading {kind} needs {package}.*pip install -e '\.\[cli\]' in a clone"):
        extract(b"x", kind, LIMITS)
