"""`entroprefill ask --ledger FILE`: draws seen in one call are known to the next."""

import json

import pytest
from typer.testing import CliRunner

from entroprefill_rag import ReuseLedger
from entroprefill_rag.cli import app


@pytest.fixture
def ask(request_file, tiny_folder):
    def run(config, *options):
        fixed = ("--request", request_file, "--model", tiny_folder, "--config", config, "--max-new-tokens", 2, "--json")
        return CliRunner().invoke(app, ["ask", *map(str, (*fixed, *options))])

    return run


def test_a_seed_that_was_used_is_refused_in_the_next_call_once_a_setting_changes(ask, loose_file, tmp_path):
    ledger, other = tmp_path / "ledger.db", tmp_path / "other.json"
    settings = json.loads(loose_file.read_text())
    other.write_text(json.dumps({**settings, "eps_row": 0.9}))
    calls = [(loose_file, 7), (loose_file, 7), (other, 7), (other, 8)]
    told = [json.loads(ask(config, "--seed", seed, "--ledger", ledger).stdout) for config, seed in calls]
    assert [one["outcome"] for one in told] == ["pruned", "pruned", "bypassed", "pruned"]
    assert told[2]["reason"]["code"] == "audit_reused"
    assert [one["audit"]["replay"] for one in told] == [False, True, False, False]
    assert told[3]["audit"]["audit"]["attempt"] == 2
    # Without the option a call knows of no other.
    assert json.loads(ask(other, "--seed", 7).stdout)["outcome"] == "pruned"
    with ReuseLedger.open(ledger) as left:
        assert left.remembered == 1
    assert [path.name for path in tmp_path.glob("ledger.db*")] == ["ledger.db"]


def test_a_file_that_is_no_ledger_is_bad_input(ask, loose_file, tmp_path):
    wrong = tmp_path / "notes.txt"
    wrong.write_text("notes of mine " * 100)
    for file, part in ((wrong, "no reuse ledger"), (tmp_path / "no" / "ledger.db", "a folder that exists")):
        result = ask(loose_file, "--ledger", file)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert part in result.stderr
