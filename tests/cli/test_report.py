"""`entroprefill report`: a record's page written to a file."""

import pytest
from typer.testing import CliRunner

from entroprefill_rag.cli import app


def call(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder):
    """A record, and the request it is about."""
    import tiny

    from entroprefill_rag import LocalBackend

    folder = tmp_path_factory.mktemp("made")
    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as backend:
        result = backend.generate(tiny.request(), tiny.LOOSE, max_new_tokens=2, do_sample=False)
    (folder / "record.json").write_text(result.audit.to_json())
    (folder / "request.json").write_text(tiny.request().model_dump_json())
    return folder


def test_the_page_is_written_and_said_to_be(made, tmp_path):
    page = tmp_path / "page.html"
    done = call(made / "record.json", "--html", page)
    assert done.exit_code == 0, done.output
    assert page.read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")
    assert "page.html" in "".join(done.stderr.split())


def test_a_request_lends_its_titles(made, tmp_path):
    for options, known in (((), False), (("--request", made / "request.json"), True)):
        page = tmp_path / "page.html"
        assert call(made / "record.json", "--html", page, *options).exit_code == 0
        assert ("title 1" in page.read_text(encoding="utf-8")) == known


@pytest.mark.parametrize("wrong", ["a request", "no file", "no folder"])
def test_bad_input_is_said_in_one_line_and_nothing_is_written(made, tmp_path, wrong):
    source = {"a request": made / "request.json", "no file": tmp_path / "absent.json"}.get(wrong, made / "record.json")
    page = tmp_path / "absent" / "p.html" if wrong == "no folder" else tmp_path / "p.html"
    done = call(source, "--html", page)
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert not page.exists()
