"""`entroprefill diagnose`: a table and sentences, or one JSON object; exit codes; one line for what is wrong."""

import json

import pytest
from typer.testing import CliRunner

from entroprefill_rag.cli import app
from entroprefill_rag.diagnosis import Diagnosis
from entroprefill_rag.diagnosis import constants as constants_module


def diagnose(*arguments):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def test_layers_and_sentences_are_shown(request_file, tiny_folder, loose_file):
    result = diagnose(request_file, "--model", tiny_folder, "--config", loose_file)
    assert result.exit_code == 0, result.output
    assert "token by token" in result.stdout
    for layer in ("3", "4", "5"):
        assert f"│ {layer:>5} │" in result.stdout
    text = " ".join(result.stdout.split())
    assert "Accepted at layer 2" in text
    assert "estimates, not guarantees" in text
    assert "Exact: the fixed-row bound held" in text


def test_one_json_object_that_can_be_read_back(request_file, tiny_folder, loose_file):
    result = diagnose(request_file, "--model", tiny_folder, "--config", loose_file, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.isascii()
    found = Diagnosis.model_validate(json.loads(result.stdout))
    assert found.layer == 2
    assert [one.layer for one in found.layers] == [3, 4, 5]


def test_layer_and_chunks_can_be_chosen(request_file, tiny_folder):
    result = diagnose(request_file, "--model", tiny_folder, "--layer", 3, "--remove", "c1", "--remove", "c4", "--json")
    assert result.exit_code == 0, result.output
    found = Diagnosis.model_validate_json(result.stdout)
    assert (found.layer, found.removed, found.forced) == (3, ("c1", "c4"), True)


def test_nothing_pruned_is_said_and_no_failure(request_file, tiny_folder, tmp_path):
    strict = tmp_path / "strict.json"
    strict.write_text('{"layers": [2], "eps_row": 1e-9, "audit": {"eps_audit": 0.95}}')
    result = diagnose(request_file, "--model", tiny_folder, "--config", strict)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Nothing was pruned")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--remove", "c1"), "give `layer` too"),
        (("--layer", 9), "choose from 1..4"),
        (("--layer", 2, "--remove", "x"), "['x']"),
    ],
)
def test_what_cannot_be_is_one_line(request_file, tiny_folder, arguments, part):
    result = diagnose(request_file, "--model", tiny_folder, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("entroprefill: ")
    assert result.stderr.count("\n") == 1
    assert part in result.stderr


def test_a_theorem_that_fails_is_exit_code_1(request_file, tiny_folder, loose_file, monkeypatch):
    monkeypatch.setattr(constants_module, "fixed_row_bound", lambda eta, norm: 1e-3 * eta * norm)
    result = diagnose(request_file, "--model", tiny_folder, "--config", loose_file)
    assert result.exit_code == 1
    assert "BUG" in result.stdout
    assert "please report" in result.stderr
