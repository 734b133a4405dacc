"""From a question to events: sources before text, the same record everywhere, and errors that lose nothing."""

import asyncio
import json
import threading
import time

import pytest

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.record import AuditRecord


def ask(client, question="bees?", path="/api/ask", **data):
    response = client.post(path, json={"question": question, **data})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_sources_come_before_text_and_the_end_says_what_it_took(client):
    events = ask(client)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["retrieved", "decision"]
    assert kinds[-1] == "done"
    assert set(kinds[2:-1]) == {"text"}
    done = events[-1]
    assert done["outcome"] == "pruned"
    assert done["kept_tokens"] < done["prompt_tokens"]
    assert 0 < done["first_token"] <= done["total"]
    assert done["generated_tokens"] == 12
    text = "".join(event["text"] for event in events if event["type"] == "text")
    assert text.strip() == done["answer"]


def test_the_page_and_the_record_say_the_same(client):
    done = ask(client)[-1]
    record = AuditRecord.from_json(client.get(f"/api/record/{done['id']}").text)
    assert [source["status"] for source in done["sources"]] == [
        "kept" if chunk.kept else "dropped" for chunk in record.prompt.chunks
    ]
    assert [layer["layer"] for layer in done["layers"]] == list(record.layers)
    accepted = next(layer for layer in done["layers"] if layer["state"] == "accepted")
    assert accepted["layer"] == record.accepted_layer
    assert accepted["saved_tokens"] == record.tokens_removed
    assert accepted["worst_row"] == record.trial.max_discarded
    assert [audit["bound"] for audit in accepted["audits"]] == [max(one.upper) for one in record.trial.audits]
    assert done["claims"]["exact"] == record.claims.exact
    assert sum(source["share"] for source in done["sources"]) == pytest.approx(1)


def test_layers_above_the_accepted_one_are_listed_as_not_reached(client):
    states = [layer["state"] for layer in ask(client)[-1]["layers"]]
    assert states == ["accepted", "not reached"]


def test_record_and_report_are_files_to_save(client):
    done = ask(client)[-1]
    for path, name in (("record", "entroprefill-record.json"), ("report", "entroprefill-report.html")):
        response = client.get(f"/api/{path}/{done['id']}")
        assert response.headers["content-disposition"] == f'attachment; filename="{name}"'
    assert "<h1>Pruned" in response.text


def test_the_same_question_without_pruning(client):
    done = ask(client)[-1]
    full = ask(client, path="/api/full", id=done["id"])[-1]
    assert full["outcome"] == "off"
    assert full["kept_tokens"] == full["prompt_tokens"] == done["prompt_tokens"]
    assert full["same"] == (full["answer"] == done["answer"])
    assert [source["path"] for source in full["sources"]] == [source["path"] for source in done["sources"]]


def test_with_pruning_off_the_reason_is_said(make_client):
    done = ask(make_client(config=PruningConfig(enabled=False)))[-1]
    assert done["outcome"] == "off"
    assert "off" in done["headline"]
    assert done["layers"] == []


def test_texts_of_strangers_come_without_control_characters(client):
    events = ask(client, "car parts far apart at a bazaar")
    [source] = [source for source in events[-1]["sources"] if "red" in source["path"]]
    assert "Car parts" in source["text"]
    assert not any(mark in json.dumps(events, ensure_ascii=False) for mark in "\x1b\x07\x9b")


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"question": " "}', 400, "empty"),
        (b"{}", 400, "empty"),
        (b'{"question": 3}', 400, "empty"),
        (b'{"question": "' + b"a" * 9000 + b'"}', 400, "9,000 characters"),
        (b'{"question": "\\ud800"}', 200, "lone surrogates"),
        (b"[]", 400, "JSON object"),
        (b"{", 400, "JSON object"),
        (b"\xff", 400, "JSON object"),
        (b"[" * 60_000, 400, "JSON object"),
        (b"x" * 70_000, 413, "64,000 bytes"),
    ],
)
def test_what_cannot_be_asked_is_said_and_the_page_lives(client, body, status, says):
    response = client.post("/api/ask", content=body)
    assert response.status_code == status
    assert says in response.text
    assert ask(client)[-1]["type"] == "done"


def test_a_question_that_does_not_fit_the_model_is_an_error_in_the_stream(client):
    [*_, last] = ask(client, "bee " * 1900)
    assert last["type"] == "error"
    assert "tokens" in last["error"]
    assert client.page._busy == 0


@pytest.mark.parametrize("path", ["/api/record/none", "/api/report/none"])
def test_an_answer_that_is_not_remembered_is_said(client, path):
    response = client.get(path)
    assert (response.status_code, response.json()["error"]) == (400, "this answer is no longer remembered; ask again")


def test_another_browser_sees_neither_answers_nor_uploads(client):
    done = ask(client)[-1]
    client.post("/api/upload", params={"name": "own.txt"}, content=b"Own words on owls.")
    client.cookies.clear()
    assert client.get(f"/api/record/{done['id']}").status_code == 400
    assert client.get("/api/status").json()["uploaded"] == []


def test_before_it_is_ready_the_page_says_how_far_it_is(make_client):
    go_on = threading.Event()

    def load(tell):
        tell("embedding", 3, 10)
        go_on.wait(20)
        raise ModelSourceError("no such model")

    client = make_client(load=load, ready=False)
    deadline = time.monotonic() + 10
    while client.get("/api/status").json()["text"] == "starting" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.get("/api/status").json()["text"] == "embedding, 3 of 10"
    response = client.post("/api/ask", json={"question": "bees?"})
    assert (response.status_code, "still loading" in response.text) == (503, True)
    go_on.set()
    while client.get("/api/status").json()["state"] == "loading" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.get("/api/status").json()["text"] == "no such model"
    response = client.post("/api/ask", json={"question": "bees?"})
    assert (response.status_code, "no such model" in response.text) == (503, True)


def test_no_more_answers_wait_than_are_allowed(make_client):
    client = make_client(most_answers=0)
    response = client.post("/api/ask", json={"question": "bees?"})
    assert (response.status_code, "try again" in response.text) == (503, True)


def test_a_browser_that_leaves_ends_its_answer(make_page):
    import tiny

    # A real answer of 1,500 tokens; the browser leaves at the first.
    page = make_page(max_new_tokens=1000, config=tiny.LOOSE)
    app = page.application(None)
    left = asyncio.Event()
    sent = []

    async def leave():
        page.loading.start()
        while page.loading.status()[0] == "loading":
            await asyncio.sleep(0.01)
        body = [{"type": "http.request", "body": b'{"question": "bees?"}', "more_body": False}]

        async def receive():
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if b'"text"' in message.get("body", b""):
                left.set()

        headers = [(b"host", b"localhost"), (b"x-entroprefill", b"1")]
        scope = {"type": "http", "method": "POST", "path": "/api/ask", "headers": headers, "query_string": b""}
        await asyncio.wait_for(app(scope | {"asgi": {"version": "3.0"}}, receive, send), 30)

    asyncio.run(leave())
    assert page._busy == 0
    assert b'"done"' not in b"".join(message.get("body", b"") for message in sent)
    deadline = time.monotonic() + 10
    while any(thread.name == "entroprefill-stream" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the generation goes on"
        time.sleep(0.05)


def test_with_a_token_nothing_is_told_before_it_is_given(make_client):
    client = make_client(token="correct horse battery")
    assert client.get("/").status_code == 200
    for method, path in (
        ("GET", "/api/status"),
        ("POST", "/api/ask"),
        ("POST", "/api/upload"),
        ("GET", "/api/record/x"),
    ):
        response = client.request(method, path, json={"question": "bees?"} if method == "POST" else None)
        assert response.status_code == 401
        assert "set-cookie" not in response.headers
    assert client.post("/api/login", json={"token": "wrong"}).status_code == 401
    assert client.post("/api/login", json={}).status_code == 401
    assert client.post("/api/login", content=b'{"token": "\\ud800"}').status_code == 401
    cookie = client.post("/api/login", json={"token": "correct horse battery"}).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert ask(client)[-1]["type"] == "done"
