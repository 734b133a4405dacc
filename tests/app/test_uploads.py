"""Files of strangers: their names and sizes are not trusted, their text is only text, and they leave nothing behind."""

import io
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from entroprefill_rag.app.uploads import InTurns, UploadStoppedError
from entroprefill_rag.app.visits import UploadLimits, Visit, Visits, safe_name
from entroprefill_rag.errors import DocumentError, RequestError


def upload(client, name, data):
    return client.post("/api/upload", params={"name": name}, content=data)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("notes.txt", "notes.txt"),
        ("../../etc/cron.d/notes.txt", "notes.txt"),
        (r"C:\Users\me\Notes of May.md", "Notes of May.md"),
        ("..\\..\\a.md", "a.md"),
        (".hidden.md", "hidden.md"),
        ("a\x00b.txt", "ab.txt"),
        ("<img src=x onerror=alert(1)>.html", "_img src=x onerror=alert(1)_.html"),
        ("\x1b[31mred.txt", "red.txt"),
        ("résumé – 2024.pdf", "résumé _ 2024.pdf"),
        ("README", "README"),
        ("a" * 300 + ".txt", "a" * 96 + ".txt"),
    ],
)
def test_of_a_name_only_harmless_parts_are_left(name, safe):
    assert safe_name(name) == safe


@pytest.mark.parametrize("name", ["", "..", "a.exe", "photo.png", "a.txt/", "archive.tar.gz", ".txt", "a." + "x" * 500])
def test_kinds_that_are_not_read_are_refused_by_name(name):
    with pytest.raises(DocumentError, match="not a kind of file"):
        safe_name(name)


@given(st.text(max_size=400), st.sampled_from([".txt", ".md", ".pdf", ".PY"]))
def test_whatever_it_is_called_it_stays_in_its_folder(stem, suffix):
    try:
        name = safe_name(stem + suffix)
    except DocumentError:
        return
    assert name not in ("", ".", "..")
    assert not name.startswith(".")
    assert Path(name).name == name
    assert "\\" not in name
    assert len(name) <= 100
    assert name.isprintable()


def test_an_upload_is_asked_about_and_can_be_removed(client):
    told = upload(client, "owls.md", b"# Owls\n\nOwls howl now. Owls owe wool.").json()
    assert (told["name"], told["uploaded"][0]["chunks"]) == ("owls.md", 1)
    sources = client.post("/api/ask", json={"question": "owls howl"}).text
    assert "uploads/owls.md" in sources
    assert client.post("/api/remove", json={"name": "owls.md"}).json()["uploaded"] == []
    assert "uploads/owls.md" not in client.post("/api/ask", json={"question": "owls howl"}).text
    assert client.post("/api/remove", json={"name": "owls.md"}).status_code == 400


def test_the_same_name_twice_makes_two_documents(client):
    upload(client, "owls.md", b"Owls howl.")
    assert upload(client, "owls.md", b"Owls hoot.").json()["name"] == "owls (2).md"
    assert client.post("/api/ask", json={"question": "owls"}).status_code == 200


def test_a_store_with_a_path_of_that_name_is_not_hidden_by_it(make_client, tmp_path):
    (tmp_path / "own" / "uploads").mkdir(parents=True)
    (tmp_path / "own" / "uploads" / "owls.md").write_text("Owls of the store.")
    client = make_client(folder=tmp_path / "own")
    assert upload(client, "owls.md", b"Owls of mine.").json()["name"] == "owls (2).md"
    assert '"done"' in client.post("/api/ask", json={"question": "owls"}).text


def test_html_in_a_document_is_text(client):
    upload(client, "page.txt", b"<script>alert('owls')</script> <img src=http://evil.example/x>")
    done = client.post("/api/ask", json={"question": "script alert owls img"}).text.splitlines()[-1]
    assert "<script>alert('owls')</script>" in done  # as JSON text, put on the page by textContent


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.pdf", b"no pdf", "cannot be read"),
        ("a.docx", b"PK\x03\x04 no archive", "cannot be read"),
        ("a.txt", b"", "cannot be read"),
        ("a.txt", b"\x00\x01\x02" * 100, "cannot be read"),
        ("a.exe", b"MZ", "not a kind of file"),
        ("", b"text", "not a kind of file"),
    ],
)
def test_what_cannot_be_read_is_said_without_a_path_of_the_machine(client, name, data, says):
    response = upload(client, name, data)
    assert response.status_code == 400
    assert says in response.json()["error"]
    assert tempfile.gettempdir() not in response.text
    assert client.get("/api/status").json()["uploaded"] == []


def test_too_large_a_file_is_refused_whatever_its_length_claims(make_client):
    client = make_client(uploads=UploadLimits(file_bytes=1000))
    assert upload(client, "a.txt", b"a" * 1001).status_code == 413
    pieces = (b"a" * 100 for _ in range(1000))
    response = client.post("/api/upload", params={"name": "a.txt"}, content=pieces)  # chunked: no length is given
    assert (response.status_code, "1,000 bytes" in response.text) == (413, True)


def test_files_and_chunks_have_a_limit(make_client):
    client = make_client(uploads=UploadLimits(files=2, chunks=6))
    assert upload(client, "long.txt", b"Owls howl at night. " * 1000).status_code == 400
    assert upload(client, "a.txt", b"Owls.").status_code == 200
    assert upload(client, "b.txt", b"Owls.").status_code == 200
    assert "remove one first" in upload(client, "c.txt", b"Owls.").json()["error"]


def test_a_long_text_is_cut_and_the_cut_is_said(make_client):
    client = make_client(uploads=UploadLimits(characters=500))
    [file] = upload(client, "long.txt", b"Owls howl at night. " * 100).json()["uploaded"]
    assert any("500" in note for note in file["notes"])


def test_uploads_can_be_off(make_client):
    client = make_client(uploads=None)
    assert upload(client, "a.txt", b"Owls.").status_code == 403
    assert client.get("/api/status").json()["uploads"] is None


def test_without_any_document_the_way_out_is_said(make_client):
    client = make_client(folder=None)
    response = client.post("/api/ask", json={"question": "owls"})
    assert (response.status_code, "upload one" in response.text) == (400, True)
    upload(client, "owls.md", b"Owls howl.")
    assert client.post("/api/ask", json={"question": "owls"}).status_code == 200


def test_nothing_stays_on_disk(client, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    upload(client, "owls.md", b"Owls howl.")
    upload(client, "bad.pdf", b"no pdf")
    assert not list(tmp_path.glob("entroprefill-*"))


def test_the_browser_that_was_away_longest_is_forgotten():
    visits = Visits(most=2)
    (first, _), (second, _) = visits.begin(), visits.begin()
    assert visits.find(first) is not None
    visits.begin()
    assert visits.find(second) is None
    assert visits.find(first) is not None
    assert visits.find("") is None


def test_who_left_nothing_here_is_forgotten_before_who_did():
    visits = Visits(most=2)
    first, visit = visits.begin()
    visit.remember(None)
    for _ in range(50):
        last, _ = visits.begin()
    assert visits.find(first) is visit
    assert visits.find(last) is not None


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("漢" * 96 + ".txt", "漢" * 32 + ".txt"),
        ("a" * 5000 + ".txt", "a" * 96 + ".txt"),
        ("cafe\u0301.md", "caf\u00e9.md"),
        ("a\ud800.md", "a_.md"),
    ],
)
def test_a_name_fits_any_file_system(given, name):
    assert safe_name(given) == name
    assert len(safe_name(given).encode()) <= 100


class Slow:
    """An embedder that takes its time, and says how many texts it was given at once."""

    name = fingerprint = "slow"

    def __init__(self):
        self.batches = []

    def documents(self, texts, progress=None):
        self.batches.append(len(texts))
        time.sleep(0.01)
        return np.ones((len(texts), 2), dtype=np.float32)

    def query(self, text):
        return np.ones(2, dtype=np.float32)


def test_a_question_need_not_wait_for_a_whole_upload():
    held, slow = threading.Lock(), Slow()
    shared = InTurns(slow, held, threading.Event())
    working = threading.Thread(target=shared.documents, args=(["text"] * 400,))
    working.start()
    while not slow.batches:
        time.sleep(0.001)
    with held:
        done = len(slow.batches)
    working.join()
    assert done < len(slow.batches) / 2
    assert sum(slow.batches) == 400


def test_an_upload_that_nobody_waits_for_ends():
    stopped, slow = threading.Event(), Slow()
    stopped.set()
    with pytest.raises(UploadStoppedError):
        InTurns(slow, threading.Lock(), stopped).documents(["text"] * 400)
    assert slow.batches == []


def test_more_chunks_than_are_taken_are_refused_before_any_is_embedded():
    slow = Slow()
    with pytest.raises(DocumentError, match="more than 3"):
        Visit().add("long.txt", b"Owls howl at night. " * 1000, slow, UploadLimits(chunks=3))
    assert slow.batches == []


def test_more_uploads_than_are_taken_at_once_are_told_to_come_again(client):
    client.page._uploading.under_way = client.page._uploading.most
    answer = upload(client, "owls.md", b"Owls howl.")
    assert (answer.status_code, "in a moment" in answer.text) == (503, True)
    client.page._uploading.under_way = 0
    assert upload(client, "owls.md", b"Owls howl.").status_code == 200
    assert client.page._uploading.under_way == 0


def test_a_docx_of_a_million_empty_paragraphs_is_not_unpacked():
    found = io.BytesIO()
    docx = pytest.importorskip("docx")
    docx.Document().save(found)
    bomb = io.BytesIO()
    with zipfile.ZipFile(found) as archive, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in archive.infolist():
            data = archive.read(entry)
            if entry.filename == "word/document.xml":
                data = data.replace(b"<w:body>", b"<w:body>" + b"<w:p/>" * 2_000_000)
            out.writestr(entry.filename, data)
    assert len(bomb.getvalue()) < 100_000
    with pytest.raises(DocumentError, match="unpacks to"):
        Visit().add("bomb.docx", bomb.getvalue(), Slow(), UploadLimits())


def test_a_browser_that_does_nothing_for_long_is_forgotten():
    visits = Visits(idle=-1)
    secret, _ = visits.begin()
    assert visits.find(secret) is None


def test_only_the_last_answers_are_remembered():
    visit = Visit()
    names = [visit.remember(None) for _ in range(25)]
    assert list(visit.answers) == names[5:]


def test_no_documents_at_all_is_a_request_error():
    with pytest.raises(RequestError, match="no documents yet"):
        Visit().index(None)
