"""What the command line is run on: a tiny model, a saved request, a configuration under which it prunes."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("engine", "chat")]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random chat model, saved."""
    import tiny

    folder = tmp_path_factory.mktemp("tiny")
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def request_file(tmp_path):
    """A request over five short chunks, with scores and a title that tries to steer the terminal."""
    import tiny

    asked = tiny.request()
    chunks = [
        chunk.model_copy(update={"title": f"\x1b[31m[red]{chunk.title}", "metadata": {"path": "d.md", "score": 0.5}})
        for chunk in asked.chunks
    ]
    file = tmp_path / "request.json"
    file.write_text(asked.model_copy(update={"chunks": tuple(chunks)}).model_dump_json())
    return file


@pytest.fixture
def loose_file(tmp_path):
    """A configuration under which the tiny model prunes."""
    import tiny

    file = tmp_path / "loose.json"
    file.write_text(tiny.LOOSE.model_dump_json())
    return file
