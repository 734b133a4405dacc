"""A tiny random model, and labelled questions short enough for it."""

import json

import pytest
import tiny

from entroprefill_rag import LocalBackend
from entroprefill_rag.bench.questions import load


@pytest.fixture(scope="session")
def backend():
    """A tiny random chat model behind a backend."""
    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny", profile=False) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """The tiny model, saved."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def question(number, *, set_name="red", answerable=True):
    """A question in the form of benchmarks/data."""
    return {
        "id": f"{set_name}-{number}",
        "set": set_name,
        "question": f"Which word is number {number}?",
        "answers": [f"word{number}"] if answerable else [],
        "chunks": [
            {"id": f"c{i}", "title": f"title {i}", "text": " ".join(f"word{i}{j}" for j in range(4 + i % 3))}
            for i in range(6)
        ],
        "gold_chunk_ids": [f"c{number % 6}"] if answerable else [],
        "meta": {"gold_need": "all" if answerable else "none"},
    }


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    """Three questions of two sets, one of them without an answer."""
    file = tmp_path_factory.mktemp("data") / "asked.jsonl"
    made = [question(0), question(1), question(2, set_name="blue", answerable=False)]
    file.write_text("".join(json.dumps(one) + "\n" for one in made))
    return file


@pytest.fixture
def questions(data_file):
    """The same, read."""
    return load([data_file])
