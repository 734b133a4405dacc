"""Request files: both forms are read, and what is wrong is told by line, without the text."""

import json

import pytest

from entroprefill_rag import Chunk, RagRequest
from entroprefill_rag.certificate.requests import digest, read_requests
from entroprefill_rag.errors import CertificateError

SECRET = "the hidden treasure"


def line(**more):
    asked = RagRequest(chunks=[Chunk(id="a", text=SECRET), Chunk(id="b", text="x")], query=SECRET)
    return json.dumps({**asked.model_dump(mode="json"), **more})


def question(**more):
    chunks = [{"id": "a", "title": None, "text": SECRET, "score": 3}, {"id": "b", "text": "x"}]
    return json.dumps({"id": "q", "question": SECRET, "chunks": chunks, "gold_chunk_ids": ["b"], **more})


def file(tmp_path, *lines):
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_both_forms_are_read(tmp_path):
    found = read_requests(
        file(
            tmp_path,
            line(),
            "",
            line(gold=["a", "a"], gold_need="any"),
            question(meta={"gold_need": "part"}),
            question(gold_chunk_ids=[]),
        )
    )
    assert [one.gold for one in found] == [None, ("a",), ("b",), ()]
    assert [one.any_is_enough for one in found] == [False, True, False, False]
    assert [one.line for one in found] == [1, 3, 4, 5]
    assert found[2].request.query == SECRET


def test_the_questions_of_the_repository_are_read(tmp_path, smoke_questions):
    found = read_requests(file(tmp_path, *(json.dumps(one) for one in smoke_questions)))
    assert [len(one.gold) for one in found] == [len(one["gold_chunk_ids"]) for one in smoke_questions]
    assert sum(one.any_is_enough for one in found) == sum(one["meta"]["gold_need"] == "any" for one in smoke_questions)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{" + SECRET, "not JSON"),
        ('"' + SECRET + '"', "a string, not an object"),
        (json.dumps({"query": SECRET, "chunks": [{"id": SECRET}]}), "chunks.0.text: Field required"),
        (json.dumps({"query": "x", "chunks": [{"id": SECRET, "text": ""}] * 2}), "a rule of requests"),
        (json.dumps({"question": SECRET, "chunks": SECRET}), "chunks"),
        (json.dumps({"question": SECRET, "chunks": [SECRET]}), "chunks.0"),
        (line(gold=SECRET), "has a string as gold; it must be a list of chunk ids"),
        (line(gold=[SECRET]), "names 1 gold chunks that it does not hold"),
        (line(gold=["a"], gold_need=SECRET), "must be one of all, any, part, none"),
        (question(gold_chunk_ids=[3]), "has a list as gold_chunk_ids"),
    ],
)
def test_a_bad_line_is_named_and_not_quoted(tmp_path, bad, why):
    with pytest.raises(CertificateError, match="line 2 of") as caught:
        read_requests(file(tmp_path, line(), bad))
    assert why in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_file_without_requests_and_one_that_is_no_text_are_refused(tmp_path):
    with pytest.raises(CertificateError, match="holds no request"):
        read_requests(file(tmp_path, "", " "))
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CertificateError, match="not UTF-8"):
        read_requests(tmp_path / "b")


def test_the_digest_follows_text_order_and_labels(tmp_path):
    def of(*lines):
        return digest(read_requests(file(tmp_path, *lines)))

    first = of(line(), line(gold=["a"]))
    assert first == of(line(), "", line(gold=["a"]))
    assert len({first, of(line(gold=["a"]), line()), of(line(), line(gold=["b"])), of(line())}) == 4
