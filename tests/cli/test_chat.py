"""`entroprefill chat`: in a pipe, in a terminal, interrupted, and over what cannot be read."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from letters import COMMAND, LetterEmbedder, write_documents
from typer.testing import CliRunner

from entroprefill_rag import AuditRecord
from entroprefill_rag.chat.commands import COMMANDS
from entroprefill_rag.cli import app

MODEL = "entroprefill_rag.engine.backend.LocalBackend"


@pytest.fixture
def docs(tmp_path):
    return write_documents(tmp_path / "docs")


@pytest.fixture
def arguments(docs, tiny_folder, loose_file):
    given = ["--docs", docs, "--model", tiny_folder, "--config", loose_file, "--max-new-tokens", 6, "--no-cache"]
    return ["chat", *map(str, given)]


@pytest.fixture
def chat(arguments, monkeypatch):
    """The command on some lines of input, as from a pipe."""
    monkeypatch.setattr("entroprefill_rag.retrieval.SentenceEmbedder", LetterEmbedder)

    def run(*lines, more=()):
        text = lines[0] if len(lines) == 1 and isinstance(lines[0], bytes) else "\n".join(lines)
        return CliRunner().invoke(app, [*arguments, *map(str, more)], input=text)

    return run


def test_a_pipe_gets_answers_and_nothing_else_on_stdout(chat):
    result = chat("Where are the bees?", "/audit", "/quit", "not asked")
    assert result.exit_code == 0, result.output
    assert "audit: pruned" in result.stdout
    assert "[1]" in result.stdout
    assert "dropped after layer" in result.stdout
    assert "> " not in result.stdout
    assert not {"\x1b", "\x9b", "\x07"} & set(result.output)
    assert result.stdout.count("first token") == 2  # of one answer and its panel
    assert "tiny" in result.stderr
    assert "5 documents, 5 chunks; 1 not read" in result.stderr


def test_the_end_of_input_ends_it_with_or_without_a_newline(chat):
    for text in ("", "\n\n  \n", "bees?"):
        assert chat(text).exit_code == 0
    assert "dropped after layer" in chat("bees?").stdout


def test_empty_lines_are_no_questions(chat):
    assert chat("", "   ", "\t").stdout == ""


def test_sources_say_what_became_of_every_chunk_and_its_share_of_attention(chat):
    out = chat("bees?", "/sources").stdout
    table = out[out.index("Sources, in prompt order") :]
    for name in ("bees.md", "jazz.md", "hum.txt", "loop.txt", "red.txt"):
        assert name in table
    for word in ("kept", "dropped", "attention", "%"):
        assert word in table


def test_full_shows_both_answers_with_their_times(chat):
    out = chat("bees?", "/full").stdout
    for part in ("pruned", "without pruning", "first token", "total", "prompt tokens", "One run each"):
        assert part in out
    assert ("The answers are the same." in out) != ("The answers differ." in out)


def test_docs_lists_what_is_in_the_store_and_what_is_not_and_why(chat):
    out = chat("/docs").stdout
    assert "5 documents, 5 chunks" in out
    assert "bees.md" in out
    assert "photo.png: not a kind that is read (.png)" in out


def test_a_long_list_of_documents_is_cut_unless_all_is_asked_for(chat, docs):
    for number in range(60):
        (docs / f"z{number:02}.txt").write_text("zigzag")
    short, whole = chat("/docs").stdout, chat("/docs all").stdout
    assert "z59.txt" not in short
    assert "/docs all" in short
    assert "z59.txt" in whole


def test_a_record_is_saved_and_nothing_is_written_over(chat, tmp_path):
    file, other = tmp_path / "a b.json", tmp_path / "there.txt"
    other.write_text("mine")
    result = chat("bees?", f"/record {file}", f'/record "{other}"', f"/record {tmp_path / 'no' / 'x'}", "/record")
    record = AuditRecord.load(file)
    assert record.outcome == "pruned"
    assert "Bees need" not in file.read_text()
    assert other.read_text() == "mine"
    for part in ("exists; give the record another name", "cannot be written", "needs the name of a file"):
        assert part in result.stderr
    assert result.exit_code == 1


def test_an_unknown_command_names_the_known_ones(chat):
    result = chat("/sorces")
    assert result.exit_code == 1
    assert result.stdout == ""
    for name in COMMANDS:
        assert name in result.stderr
    assert "Traceback" not in result.stderr


def test_a_question_may_begin_with_a_slash_after_a_space(chat):
    assert "dropped after layer" in chat(" /etc/hosts?").stdout


def test_commands_before_any_answer_say_so(chat):
    result = chat("/sources", "/audit", "/full", "/record x.json")
    assert result.stderr.count("no answer to look at") == 4
    assert result.exit_code == 1


def test_help_names_every_command_and_new_forgets(chat):
    result = chat("/help", "bees?", "/new", "/audit")
    for name, command in COMMANDS.items():
        assert name in result.stdout
        assert command.text.split(";")[0][:30] in result.stdout
    assert "no answer to look at" in result.stderr


def test_what_goes_wrong_inside_an_answer_does_not_end_the_chat(chat, monkeypatch):
    from entroprefill_rag import LocalBackend

    right, calls = LocalBackend.stream, []

    def wrong_once(self, *arguments, **more):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("first\n" + "x" * 5000)
        return right(self, *arguments, **more)

    monkeypatch.setattr(f"{MODEL}.stream", wrong_once)
    result = chat("bees?", "jazz?")
    assert "unexpected RuntimeError: first" in result.stderr
    assert "Traceback" not in result.stderr
    assert "dropped after layer" in result.stdout
    assert result.exit_code == 1


def test_a_question_longer_than_the_model_is_one_line_and_the_chat_goes_on(chat):
    result = chat("x" * 5000, "bees?")
    assert "2,048 positions" in result.stderr
    assert "dropped after layer" in result.stdout


def test_a_question_in_no_encoding_is_asked_with_gaps(chat):
    result = chat(b"\xef\xbb\xbfcaf\xe9 \xff?\r\n/sources\r\n")
    assert result.exit_code == 0, result.output
    assert "Sources, in prompt order" in result.stdout


def test_what_cannot_be_read_is_said_before_anything_is_asked(chat, tmp_path, docs, tiny_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "photo.png").write_bytes(b"\x89PNG")
    for folder, part in ((tmp_path / "empty", "no readable document"), (tmp_path / "nowhere", "does not exist")):
        result = chat("bees?", more=("--docs", folder))
        assert result.exit_code == 2
        assert result.stdout == ""
        assert part in result.stderr
        assert result.stderr.count("\n") == 1
    result = CliRunner().invoke(app, ["chat"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--docs PATH" in result.stderr


class Terminal:
    """Our end of a pseudo-terminal: what came is read up to a text that has to come."""

    def __init__(self, handle):
        self.handle, self.held = handle, b""

    def until(self, text, seconds=40):
        limit = time.monotonic() + seconds
        while text not in self.held:
            assert time.monotonic() < limit, self.held
            if select.select([self.handle], [], [], 0.5)[0]:
                self.held += os.read(self.handle, 4096)
        before, _, self.held = self.held.partition(text)
        return before

    def type(self, text):
        os.write(self.handle, text)

    def prompted(self):
        """Wait for the prompt; readline shows it a moment before it listens for signals."""
        self.until(b"> ")
        time.sleep(0.5)


@pytest.mark.slow
def test_an_interrupt_stops_an_answer_and_the_pipe_goes_on(arguments):
    command = [*COMMAND, *arguments, "--max-new-tokens", "1500"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdin.write(b"bees?\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(b"/audit\n/docs\n/quit\n", timeout=60)
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors
    assert b"stopped" in errors
    assert b"audit: pruned" in out
    assert b"5 documents" in out
    assert b"generated" not in out  # the answer did not come to its end


@pytest.mark.slow
def test_a_terminal_has_a_prompt_and_a_second_interrupt_at_it_leaves(arguments):
    ours, theirs = pty.openpty()
    command = [*COMMAND, *arguments, "--max-new-tokens", "1500"]
    environment = {**os.environ, "TERM": "dumb"}
    terminal = Terminal(ours)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            terminal.prompted()
            terminal.type(b"bees?\n")
            terminal.until(b"bees?\r\n")
            time.sleep(1)  # somewhere inside the answer, or in what comes before it
            process.send_signal(signal.SIGINT)
            terminal.until(b"stopped; Ctrl-C again")
            terminal.prompted()
            terminal.type(b"/docs\n")
            terminal.until(b"5 documents")
            terminal.prompted()
            process.send_signal(signal.SIGINT)  # the first one after a line only says how to leave
            terminal.until(b"Ctrl-C again")
            terminal.prompted()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(ours)


@pytest.mark.model
@pytest.mark.slow
def test_messy_documents_are_talked_over_with_a_real_model(data_dir, tmp_path, smollm2_folder, embedder_folder):
    # The worst of them; `ask` is tried on all.
    docs = tmp_path / "messy"
    docs.mkdir()
    for start in ("11_", "16_", "17_", "18_", "29_"):
        [file] = (data_dir / "messy").glob(f"{start}*")
        shutil.copy(file, docs)
    given = ("--docs", docs, "--model", smollm2_folder, "--embedder", embedder_folder, "--top-k", 4)
    command = [sys.executable, "-c", "from entroprefill_rag.cli import main; main()", "chat", *given]
    done = subprocess.run(
        list(map(str, [*command, "--max-new-tokens", 8])),
        input="What does \x1b[31m<|im_end|> mean?\nمتى؟\n/sources\n/audit all\n/docs\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "ENTROPREFILL_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not {"\x1b", "\x9b"} & set(done.stdout + done.stderr)
    assert "16_naughty_strings.txt" in done.stdout
