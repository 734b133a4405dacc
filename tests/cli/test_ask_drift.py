"""`entroprefill ask` when a pruned answer drifts: called off where it was printed, and left out of the JSON object."""

import json

import pytest
import tiny
from typer.testing import CliRunner

from entroprefill_rag import AuditRecord
from entroprefill_rag.cli import app


@pytest.fixture
def options(request_file, tiny_folder, tmp_path):
    """Arguments of a call whose answer drifts at once; the configuration says what then."""

    def made(on_drift, *more):
        config = tiny.LOOSE.model_copy(update={"on_drift": on_drift, "drift_threshold": 0.05})
        (tmp_path / "drift.json").write_text(config.model_dump_json())
        given = ["--request", request_file, "--model", tiny_folder, "--config", tmp_path / "drift.json"]
        return ["ask", *map(str, [*given, "--max-new-tokens", 8, *more])]

    return made


def ask(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_restart_calls_off_what_was_printed_and_prints_the_answer(options, tmp_path):
    shown = ask(options("restart_full", "--record", tmp_path / "r.json"))
    record = AuditRecord.load(tmp_path / "r.json")
    notice = shown.index("[not the answer: Generated token 1 placed")
    assert notice < shown.index("The answer:]") < shown.index("Sources, in prompt order")
    assert (record.outcome, record.reason.code) == ("bypassed", "drift_restart")
    words = " ".join(shown.replace("│", " ").split())
    assert "audit: bypassed" in words
    assert "EXCEEDED at token 1: the answer looks back at what was dropped; it was answered again in full" in words
    assert "2 more given up" in words
    assert "nothing dropped drift_restart: Generated token 1" in words


def test_json_holds_the_answer_that_stands_only(options, request_file, tiny_folder):
    data = json.loads(ask(options("restart_full", "--json")))
    assert data["reason"]["code"] == "drift_restart"
    assert data["audit"]["decode"]["action"] == "restarted_full"
    assert data["dropped_ids"] == []
    plain = ask(["ask", "--request", str(request_file), "--model", str(tiny_folder), "--no-prune", "--json"])
    assert json.loads(plain)["answer"].startswith(data["answer"].rstrip("\ufffd"))


def test_an_answer_that_was_stopped_says_so(options):
    shown = " ".join(ask(options("stop")).replace("│", " ").split())
    assert "EXCEEDED at token 1: the answer looks back at what was dropped; the answer ends there" in shown
    assert "not the answer" not in shown
    assert json.loads(ask(options("stop", "--json")))["finish_reason"] == "drift"
