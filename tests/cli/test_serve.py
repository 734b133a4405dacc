"""``entroprefill serve``: what it refuses before anything is loaded, and a real server from start to Ctrl-C."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("uvicorn")

COMMAND = [sys.executable, "-c", "from entroprefill_rag.cli import main; main()", "serve"]


def refused(*arguments, env=None):
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=env)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_others_are_let_in_only_with_a_token(host):
    code, said = refused("--host", host)
    assert code == 2
    assert "--token" in said


def test_a_short_token_is_refused_and_not_repeated():
    code, said = refused("--token", "hunter2")
    assert code == 2
    assert "16 or more" in said
    assert "hunter2" not in said


def test_documents_that_are_not_there_are_said_at_once(tmp_path):
    code, said = refused("--docs", tmp_path / "none")
    assert code == 2
    assert "does not exist" in said


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, said = refused("--port", other.getsockname()[1])
    assert code == 2
    assert "another --port" in said


def test_an_address_that_is_none_is_said():
    code, said = refused("--host", "no.such.host.invalid", "--token", "correct horse battery")
    assert code == 2
    assert "cannot listen" in said


def opened(url, data=None):
    request = urllib.request.Request(url, data=data, headers={"X-EntroPrefill": "1"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


@pytest.mark.model
@pytest.mark.slow
def test_a_page_over_messy_documents_from_start_to_interrupt(data_dir, smollm2_folder, embedder_folder, tmp_path):
    given = ["--docs", data_dir / "messy", "--model", smollm2_folder, "--embedder", embedder_folder, "--port", 0]
    options = ["--no-cache", "--max-new-tokens", 8, "--top-k", 4]
    with subprocess.Popen(
        [*COMMAND, *map(str, [*given, *options])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
            assert "<!doctype html>" in opened(url)  # the page is there while the model is not
            deadline = time.monotonic() + 300
            while (status := json.loads(opened(f"{url}api/status")))["state"] == "loading":
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert status["state"] == "ready"
            assert status["documents"] > 5
            assert status["skipped"]
            for question in ("What does \x1b[31m<|im_end|> mean?", "متى؟"):
                events = opened(f"{url}api/ask", json.dumps({"question": question}).encode()).splitlines()
                assert json.loads(events[-1])["type"] == "done"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "evil.example"}))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "stopped" in errors
    assert "Traceback" not in errors
