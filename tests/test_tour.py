"""The tour stays true: its commands and snippets run in order, as a reader would run them, and show what it shows.

Two things differ from a reader's machine: the environment is made already, so that `make` only says what it would do,
and snippets share one loaded model.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TOUR, re.DOTALL)
# Codes of section 7, and the name under which the page keeps what its snippet found.
REASONS = {
    "too_few_chunks": "too_few",
    "saving_out_of_reach": "out_of_reach",
    "caps_leave_nothing": "capped",
    "no_document_mass": "elsewhere",
    "audit_failed": "failed",
}


def shell(code, folder, environment, typed):
    """Run a block; variables that it sets are there in the next one."""
    script = f'make() {{ command make -C "{ROOT}" -n "$@"; }}\nset -ea\n{code}\nset +a\nenv -0 > "{folder}/.env"\n'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    pairs = (line.partition("=") for line in (folder / ".env").read_text().split("\0") if line)
    return done.stdout, {name: value for name, _, value in pairs if not name.startswith("BASH_FUNC")}


def typed_in(shown):
    """What a reader types into a program whose output is shown."""
    return "".join(f"{line[2:]}\n" for line in shown.splitlines() if line.startswith("> "))


def labels(shown):
    """The fixed parts of an output: labels of its lines up to the first figure, without the model's own words."""
    if not typed_in(shown):
        shown = shown.partition("\n\n")[2]  # the answer is the model's
    for line in shown.splitlines():
        bare = re.sub(r"[╭╰│─]", " ", line).strip()
        if bare and not line.startswith("> ") and not re.match(r"\[?\d", bare):
            yield " ".join(re.split(r"\s{2,}|:| \d", bare)[0].split())


@pytest.mark.model
@pytest.mark.slow
def test_every_command_and_snippet_runs_and_shows_what_the_page_shows(
    tmp_path, smollm2, smollm2_folder, embedder_folder, monkeypatch
):
    from entroprefill_rag import LocalBackend
    from entroprefill_rag.integrations.llama_index import set_default_backend

    shutil.copytree(ROOT / "examples" / "documents", tmp_path / "examples" / "documents")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENTROPREFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ENTROPREFILL_MODEL", str(smollm2_folder))
    monkeypatch.setenv("ENTROPREFILL_EMBEDDER", str(embedder_folder))
    environment, names, out = dict(os.environ), {"__name__": "tour"}, ""
    with LocalBackend(*smollm2, name="smollm2-135m") as backend:
        set_default_backend(backend)
        monkeypatch.setattr(LocalBackend, "from_pretrained", lambda name: backend)
        for number, (language, code) in enumerate(BLOCKS):
            if language == "bash":
                following = BLOCKS[number + 1] if number + 1 < len(BLOCKS) else ("", "")
                typed = typed_in(following[1]) if following[0] == "text" else ""
                out, environment = shell(code, tmp_path, environment, typed)
            elif language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as written:
                    exec(compile(code, f"block {number} of tour.md", "exec"), names)
                out = written.getvalue()
            else:
                words = " ".join(out.split())
                assert [label for label in labels(code) if label not in words] == [], out
        set_default_backend(None)
    # What came of it.
    assert names["response"].metadata["entroprefill"]["outcome"] in ("pruned", "bypassed")
    assert names["output"]["entroprefill"]["outcome"] in ("pruned", "bypassed")
    assert "lease.md#0" in [node.node_id for node in names["response"].source_nodes]
    assert "lease.md#0" in names["output"]["retained_ids"]
    assert (tmp_path / "record.html").read_text().startswith("<!doctype html>")
    for code, name in REASONS.items():
        assert names[name] == {code}


def test_the_reasons_of_the_page_are_codes_of_the_rule():
    from entroprefill_rag.rule.monitor import VERDICTS

    named = re.findall(r"^\*\*`(\w+)`\*\*", TOUR, re.MULTILINE)
    assert named == list(REASONS)
    assert set(named) <= set(VERDICTS)


def test_every_block_is_of_a_kind_that_is_run_or_compared():
    assert {language for language, _ in BLOCKS} == {"bash", "python", "text"}
    assert TOUR.count("```") == 2 * len(BLOCKS)
    first = next(code for language, code in BLOCKS if language == "text")
    found = list(labels(first))
    assert found[:2] == ["Sources, in prompt order", "#"]
    assert "audit" in found
