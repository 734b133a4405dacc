"""`entroprefill verify`, `sign` and `show`: a record checked, run again, vouched for; exit codes for scripts."""

import json

import pytest
from typer.testing import CliRunner

from entroprefill_rag import AuditRecord
from entroprefill_rag.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def record_file(tiny_folder, request_file, loose_file, tmp_path):
    """A record of a pruned answer, by the command line itself."""
    file = tmp_path / "record.json"
    done = run(
        *("ask", "--request", request_file, "--model", tiny_folder, "--config", loose_file, "--record", file),
        *("--save-request", tmp_path / "saved.json", "--max-new-tokens", 4),
    )
    assert done.exit_code == 0, done.output
    assert AuditRecord.load(file).outcome == "pruned"
    return file


@pytest.fixture
def tampered_file(record_file, tmp_path):
    """The same record with a smaller loss, and a title that tries to steer the terminal."""
    data = json.loads(record_file.read_text())
    data["trials"][0]["max_discarded"] *= 0.5
    data["trials"][0]["solver"] = "\x1b[31mgreedy"
    file = tmp_path / "tampered.json"
    file.write_text(json.dumps(data))
    return file


def test_a_record_that_follows_exits_with_0_and_says_what_it_cannot_show(record_file):
    done = run("verify", record_file)
    assert done.exit_code == 0, done.output
    assert "Every derived number follows" in done.stdout
    assert "on which model it ran" in done.stdout


def test_a_tampered_record_exits_with_1_and_names_field_numbers_and_rule(tampered_file):
    done = run("verify", tampered_file)
    assert done.exit_code == 1, done.output
    assert "max_discarded" in done.stdout.replace("\n", "")
    assert "do not follow" in done.stdout
    assert "\x1b[31mgreedy" not in done.stdout


def test_the_json_of_a_check_holds_findings_and_limits(tampered_file, record_file):
    done = run("verify", tampered_file, "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 1
    assert told["follows"] is False
    assert "trials[0].max_discarded" in [one["path"] for one in told["findings"]]
    assert {"path", "recorded", "follows", "rule"} == set(told["findings"][0])
    assert told["cannot_know"]
    assert "\x1b" not in done.stdout
    assert json.loads(run("verify", record_file, "--json").stdout)["findings"] == []


def test_a_replay_of_the_saved_request_comes_out_the_same(record_file, tiny_folder, tmp_path):
    done = run("verify", record_file, "--request", tmp_path / "saved.json", "--model", tiny_folder)
    assert done.exit_code == 0, done.output
    assert "it came out the same" in done.stdout


def test_a_replay_of_another_request_does_not(record_file, tiny_folder, request_file, tmp_path):
    asked = json.loads(request_file.read_text())
    asked["query"] = "And now?"
    file = tmp_path / "other.json"
    file.write_text(json.dumps(asked))
    done = run("verify", record_file, "--request", file, "--model", tiny_folder, "--json")
    assert done.exit_code == 1
    assert [one["path"] for one in json.loads(done.stdout)["findings"]] == ["prompt.hash"]


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_request_in_the_place_of_a_record_is_called_one(command, request_file, tmp_path):
    done = run(command, request_file)
    assert done.exit_code == 2
    assert "is a request, not a record" in done.stderr
    junk = tmp_path / "junk.json"
    junk.write_text("[1]")
    done = run(command, junk)
    assert done.exit_code == 2
    assert "not a record of schema" in done.stderr
    assert run(command, tmp_path / "none.json").exit_code == 2


def test_a_signed_record_is_vouched_for_until_anything_is_changed(record_file, tmp_path):
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("a shared key of many bytes\n")
    other.write_text("another key of as many bytes\n")
    assert run("verify", record_file, "--key-file", key).exit_code == 2, "no signature yet"
    assert run("sign", record_file, "--key-file", key).exit_code == 0
    assert run("verify", record_file, "--key-file", key).exit_code == 0
    assert run("verify", record_file, "--key-file", other).exit_code == 1
    data = json.loads(record_file.read_text())
    data["model"]["name"] = "another"
    record_file.write_text(json.dumps(data))
    assert run("verify", record_file).exit_code == 0, "no other number depends on the model's name"
    done = run("verify", record_file, "--key-file", key)
    assert done.exit_code == 1
    assert "(signature)" in done.stdout
