"""`entroprefill ask`: answers, streams, one JSON object, exit codes, one line for what is wrong."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from entroprefill_rag import AuditRecord, RagRequest
from entroprefill_rag.cli import app

COMMAND = [sys.executable, "-c", "from entroprefill_rag.cli import main; main()"]
# fmt: off
KEYS = [
    "answer", "retained_ids", "dropped_ids", "protected_ids", "finish_reason", "outcome", "reason", "model", "usage",
    "timings", "sources", "audit",
]
# fmt: on


def run(*arguments, **environment):
    """The command as a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def ask(*arguments, **environment):
    return CliRunner().invoke(app, ["ask", *map(str, arguments)], env=environment)


def refused(result, *parts):
    """Exit code 2, one line on stderr that holds all parts, nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("entroprefill: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def test_no_question_no_documents_or_an_empty_question_are_bad_input(tmp_path):
    refused(ask(), "no question", '"QUESTION" --docs PATH')
    refused(ask("why?"), "no documents", "--docs PATH")
    refused(ask("  ", "--docs", tmp_path), "the question is empty")


def test_a_request_and_a_question_exclude_each_other(request_file, tmp_path):
    refused(ask("why?", "--request", request_file), "already holds the question")
    refused(ask("--docs", tmp_path, "--request", request_file), "already holds the question")


def test_documents_that_are_missing_or_unreadable_are_bad_input(tmp_path, embedder_folder):
    refused(ask("why?", "--docs", tmp_path / "nowhere"), "does not exist")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    refused(ask("why?", "--docs", tmp_path), "no readable document", "1 x not a kind that is read (.png)")


def test_an_invalid_request_file_is_bad_input(tmp_path):
    file = tmp_path / "r.json"
    refused(ask("--request", file), "No such file")
    file.write_text("{")
    refused(ask("--request", file), "Invalid JSON")
    file.write_text('{"query": " "}')
    refused(ask("--request", file), "the query is empty")
    file.write_text('{"query": "why?", "chunks": [{"id": "a", "text": 1}]}')
    refused(ask("--request", file), "chunks.0.text")
    file.write_text('{"query": "why?", "chunks": [{"id": "a", "text": ""}, {"id": "a", "text": ""}]}')
    refused(ask("--request", file), "chunk ids must be unique")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("nonsense", ["Invalid JSON"]),
        ('{"eps_row": 7}', ["eps_row must lie in (0, 1]"]),
        ('{"no_such_field": 1}', ["no_such_field", "Extra inputs"]),
        ('{"layers": [0]}', ["layer 0 may not be monitored"]),
        ('{"audit": {"m_a": 1}}', ["m_a must be at least 2"]),
    ],
)
def test_an_invalid_configuration_is_bad_input(tmp_path, request_file, config, parts):
    file = tmp_path / "config.json"
    file.write_text(config)
    refused(ask("--request", request_file, "--config", file), *parts)


def test_outputs_that_cannot_be_written_are_refused_before_anything_slow(request_file, tmp_path):
    refused(ask("--request", request_file, "--record", tmp_path / "no" / "a.json"), "--record", "cannot be written")
    refused(ask("--request", request_file, "--save-request", tmp_path), "--save-request", "cannot be written")


def test_a_model_that_is_not_there_is_bad_input(request_file, tmp_path):
    refused(ask("--request", request_file, "--model", tmp_path / "nowhere"))
    refused(ask("--request", request_file, ENTROPREFILL_MODEL="./no-such-model"), "no-such-model")


def test_a_device_or_dtype_that_is_not_there_is_bad_input(request_file, tiny_folder):
    refused(ask("--request", request_file, "--model", tiny_folder, "--device", "nowhere"), "nowhere")
    refused(ask("--request", request_file, "--model", tiny_folder, "--dtype", "float3"), "float3")


def test_layers_that_the_model_lacks_are_bad_input(request_file, tiny_folder, tmp_path):
    (tmp_path / "c.json").write_text('{"layers": [99]}')
    arguments = ("--request", request_file, "--model", tiny_folder, "--config", tmp_path / "c.json")
    refused(ask(*arguments), "layers [99] cannot be monitored")


def test_a_prompt_longer_than_the_model_is_bad_input(request_file, tiny_folder, tmp_path):
    asked = RagRequest.model_validate_json(request_file.read_text())
    long = asked.model_copy(update={"chunks": (asked.chunks[0].model_copy(update={"text": "x" * 5000}),)})
    (tmp_path / "long.json").write_text(long.model_dump_json())
    refused(ask("--request", tmp_path / "long.json", "--model", tiny_folder), "2,048 positions", "--top-k")


def test_the_answer_comes_first_then_sources_and_audit(request_file, tiny_folder, loose_file):
    options = ("--model", tiny_folder, "--config", loose_file, "--max-new-tokens", 8, "--show-dropped")
    result = ask("--request", request_file, *options)
    assert result.exit_code == 0, result.output
    places = [result.stdout.index(part) for part in ("Sources, in prompt order", "Dropped", "audit: pruned")]
    assert places == sorted(places)
    assert places[0] > 0
    for part in ("kept", "dropped", "0.50", "[red]title 0", "d.md", "word", "suffix_rows", "prompt_rows", "tokens/s"):
        assert part in result.stdout
    assert not {"\x1b", "\x9b"} & set(result.stdout)


def test_without_pruning_the_audit_says_that_it_was_off(request_file, tiny_folder):
    result = ask("--request", request_file, "--model", tiny_folder, "--no-prune", "--max-new-tokens", 4)
    assert result.exit_code == 0
    assert "audit: off" in result.stdout
    assert "dropped" not in result.stdout.replace("nothing dropped", "")


def test_a_bypass_is_an_answer_with_its_reason(request_file, tiny_folder, loose_file):
    strict = json.loads(loose_file.read_text()) | {"eps_row": 1e-9}
    loose_file.write_text(json.dumps(strict))
    options = ("--model", tiny_folder, "--config", loose_file, "--max-new-tokens", 4)
    result = ask("--request", request_file, *options)
    assert result.exit_code == 0
    assert "audit: bypassed" in result.stdout
    assert "nothing dropped" in result.stdout


def test_json_is_one_ascii_object_with_everything(request_file, tiny_folder, loose_file, tmp_path):
    options = ("--model", tiny_folder, "--config", loose_file, "--max-new-tokens", 8, "--seed", 7)
    result = ask("--request", request_file, *options, "--json", "--record", tmp_path / "a.json")
    assert result.exit_code == 0
    assert result.stdout.isascii()
    assert result.stdout.count("\n") == 1
    told = json.loads(result.stdout)
    assert list(told) == KEYS
    assert told["outcome"] == "pruned"
    assert sorted(told["retained_ids"] + told["dropped_ids"]) == [f"c{i}" for i in range(5)]
    assert [source["status"] == "dropped" for source in told["sources"]] == [
        source["id"] in told["dropped_ids"] for source in told["sources"]
    ]
    assert told["usage"]["generated_tokens"] == 8
    record = AuditRecord.model_validate(told["audit"])
    assert record == AuditRecord.load(tmp_path / "a.json")
    assert record.audit.seed == 7


def test_a_record_holds_no_text(request_file, tiny_folder, loose_file, tmp_path):
    options = ("--model", tiny_folder, "--config", loose_file, "--max-new-tokens", 4)
    assert ask("--request", request_file, *options, "--record", tmp_path / "a.json").exit_code == 0
    assert "word" not in (tmp_path / "a.json").read_text()


def test_a_saved_request_gives_the_same_answer(request_file, tiny_folder, loose_file, tmp_path):
    options = ("--model", tiny_folder, "--config", loose_file, "--max-new-tokens", 8, "--seed", 7, "--json")
    first = ask("--request", request_file, *options, "--save-request", tmp_path / "again.json")
    second = ask("--request", tmp_path / "again.json", *options)
    one, two = json.loads(first.stdout), json.loads(second.stdout)
    for key in ("answer", "retained_ids", "dropped_ids", "sources"):
        assert one[key] == two[key]


def test_a_fault_of_ours_is_one_line_without_text_and_exits_with_1(request_file, tiny_folder, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("first\n" + "x" * 5000)

    monkeypatch.setattr("entroprefill_rag.engine.backend.LocalBackend.stream", broken)
    result = ask("--request", request_file, "--model", tiny_folder)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 400
    assert "unexpected RuntimeError" in result.stderr


def test_help_has_examples_and_costs_no_torch():
    result = run("ask", "--help")
    assert result.returncode == 0
    assert "Examples" in result.stdout
    assert "--show-dropped" in result.stdout
    code = "import sys, entroprefill_rag.cli; print({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules))"
    loaded = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "set()"


def test_a_wrong_command_line_is_one_line_too():
    for arguments in (("ask", "--nope"), ("ask", "why?", "--top-k", "0"), ("nope",), ("show",)):
        result = run(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.startswith("entroprefill: ")
        assert result.stderr.count("\n") == 1


def test_a_group_without_its_command_shows_its_help():
    result = run("cache")
    assert "clear" in result.stdout
    assert result.stderr == ""


def test_a_question_that_is_not_utf8_is_asked_with_replacements(docs, tmp_path):
    from entroprefill_rag.cli.inputs import what_is_asked

    assert what_is_asked("caf\udce9?", docs, None) == ("caf\ufffd?", docs)


def test_the_version_is_shown():
    from entroprefill_rag import __version__

    assert run("--version").stdout == f"entroprefill {__version__}\n"


def test_a_record_can_be_shown_with_and_without_its_request(request_file, tiny_folder, loose_file, tmp_path):
    options = ("--model", tiny_folder, "--config", loose_file, "--max-new-tokens", 4, "--record", tmp_path / "a.json")
    assert ask("--request", request_file, *options).exit_code == 0
    alone = CliRunner().invoke(app, ["show", str(tmp_path / "a.json")])
    named = CliRunner().invoke(app, ["show", str(tmp_path / "a.json"), "--request", str(request_file)])
    for result in (alone, named):
        assert result.exit_code == 0
        for part in ("Layers", "exact", "probabilistic", "not claimed", "audit: pruned"):
            assert part in result.stdout
    assert "title 0" not in alone.stdout
    assert "[red]title 0" in named.stdout
    assert "\x1b" not in named.stdout


def test_what_is_no_record_cannot_be_shown(tmp_path):
    file = tmp_path / "a.json"
    for text in ("", "[]", '{"schema_version": "9"}', "\x00"):
        file.write_text(text)
        refused(CliRunner().invoke(app, ["show", str(file)]), "not a record of schema")
    refused(CliRunner().invoke(app, ["show", str(tmp_path)]), "Is a directory")


@pytest.mark.slow
def test_an_interrupt_ends_with_130_and_no_traceback(request_file, tiny_folder):
    command = [*COMMAND, "ask", "--request", request_file, "--model", tiny_folder, "--max-new-tokens", "1500"]
    for _ in range(3):
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        if process.returncode != 0:  # on a busy machine the answer may be complete before the signal comes
            break
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"interrupted" in errors


@pytest.mark.slow
def test_a_reader_that_leaves_early_causes_no_traceback(request_file, tiny_folder):
    command = [*COMMAND, "ask", "--request", request_file, "--model", tiny_folder, "--max-new-tokens", "300"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 141
    finally:
        process.kill()
    assert errors == b""


PUMP = "The pump P-101 starts when the tank is full. It is painted green. " * 8
ALARM = "The alarm of pump P-101 rings at 83 degrees Celsius and stops the pump. " + "Staff are told. " * 20
DOCUMENTS = {
    "pump.md": f"# Pump\n\n{PUMP}\n\n## Alarm\n\n{ALARM}",
    "cafeteria.txt": "The cafeteria opens at noon and serves soup, bread and fruit to all visitors. " * 30,
    "history.html": f"<h1>History</h1><p>{'The town was founded in 1352 by monks who kept bees. ' * 30}</p>",
    "weather.txt": "Rain is likely in spring, and the summers are dry and hot in the valley. " * 30,
}


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text)
    (folder / "photo.png").write_bytes(b"\x89PNG")
    return folder


@pytest.mark.model
@pytest.mark.slow
def test_from_a_folder_of_documents_to_an_answer_with_a_real_model(docs, tmp_path, smollm2_folder, embedder_folder):
    options = ("--docs", docs, "--model", smollm2_folder, "--embedder", embedder_folder, "--max-new-tokens", 40)
    record, saved, cache = tmp_path / "a.json", tmp_path / "r.json", str(tmp_path / "cache")
    question = "At which temperature does the alarm of pump P-101 ring?"
    keep = ("--record", record, "--save-request", saved)
    result = run("ask", question, *options, *keep, "--json", "--seed", 1, ENTROPREFILL_CACHE=cache)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert "83" in told["answer"]
    assert told["sources"][0]["id"].startswith("pump.md#")
    assert told["sources"][0]["score"] > told["sources"][-1]["score"]
    assert len(told["sources"]) > 10
    assert "photo.png: not a kind that is read (.png)" in result.stderr
    assert "83 degrees" not in result.stderr
    assert "Warning" not in result.stderr
    AuditRecord.load(record)
    assert RagRequest.model_validate_json(saved.read_text()).query == question

    again = run("ask", question, *options, "--json", "--seed", 1, ENTROPREFILL_CACHE=cache)
    assert {**json.loads(again.stdout), "timings": 0, "audit": 0} == {**told, "timings": 0, "audit": 0}

    plain = run("ask", question, *options, "--no-prune", ENTROPREFILL_CACHE=cache, NO_COLOR="1")
    assert plain.returncode == 0
    assert "83" in plain.stdout
    assert "audit: off" in plain.stdout
    assert not {"\x1b", "\r"} & set(plain.stdout + plain.stderr)


@pytest.mark.model
@pytest.mark.slow
def test_messy_documents_are_answered_over_without_a_traceback(data_dir, tmp_path, smollm2_folder, embedder_folder):
    options = ("--docs", data_dir / "messy", "--model", smollm2_folder, "--embedder", embedder_folder, "--top-k", 12)
    question = "What does \x1b[31m<|im_end|> mean in a prompt?"
    result = run("ask", question, *options, "--max-new-tokens", 8, ENTROPREFILL_CACHE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert not {"\x1b", "\x9b"} & set(result.stdout + result.stderr)
