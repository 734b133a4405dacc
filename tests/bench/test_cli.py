"""`entroprefill bench`: a run of the tiny model, resumed and reported; bad input in one line."""

import json

import pytest
from typer.testing import CliRunner

from entroprefill_rag.cli import app


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder, data_file):
    """A finished run of few methods."""
    folder = tmp_path_factory.mktemp("out")
    arguments = ("--model", tiny_folder, "--data", data_file, "--max-new-tokens", 3, "--out", folder)
    result = bench(*arguments, "--methods", "ours,random,none", "--questions", 2)
    assert result.exit_code == 0, result.output
    return folder, arguments


def test_rows_and_report_are_written_without_text(finished):
    folder, _ = finished
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok"] * 8
    assert {row["method"] for row in rows} == {"full", "ours", "random", "none"}
    for name in ("rows.jsonl", "report.md", "report.html", "summary.json"):
        assert "Which word" not in (folder / name).read_text()
        assert "word0" not in (folder / name).read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"]
    assert [one["n"] for one in summary["methods"]] == [2, 2, 2, 2]


def test_the_report_can_be_made_anew(finished, tmp_path):
    folder, _ = finished
    before = {name: (folder / name).read_text() for name in ("report.md", "report.html", "quality.svg", "summary.json")}
    for name in before:
        (folder / name).unlink()
    result = bench("--report-only", folder, "--docs", tmp_path)
    assert result.exit_code == 0, result.output
    assert {name: (folder / name).read_text() for name in before} == before
    assert json.loads((tmp_path / "benchmark" / "summary.json").read_text()) == json.loads(before["summary.json"])


def test_the_same_folder_takes_more_questions_and_methods(finished):
    folder, arguments = finished
    before = (folder / "rows.jsonl").read_text()
    result = bench(*arguments, "--methods", "gold")
    assert result.exit_code == 0, result.output
    after = (folder / "rows.jsonl").read_text()
    assert after.startswith(before)
    summary = json.loads((folder / "summary.json").read_text())
    found = {one["name"]: one["n"] for one in summary["methods"]}
    assert found == {"full": 3, "ours": 2, "random": 2, "none": 2, "gold": 2}
    assert all(one["what"] for one in summary["methods"])


def test_a_run_whose_time_is_over_says_so(tiny_folder, data_file, tmp_path, monkeypatch):
    from entroprefill_rag.bench.session import Session

    go = Session.go

    def first_question_then_over(self, questions, progress=None):
        assert self.minutes == 5.0
        go(self, questions[:1], progress)
        self.minutes = 1e-9
        return go(self, questions, progress)

    monkeypatch.setattr(Session, "go", first_question_then_over)
    result = bench(
        "--model",
        tiny_folder,
        "--data",
        data_file,
        "--out",
        tmp_path,
        "--quick",
        "--methods",
        "none",
        "--max-new-tokens",
        2,
    )
    assert result.exit_code == 0, result.output
    assert "the time is over" in result.output
    assert not json.loads((tmp_path / "summary.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--methods", "magic"), "there is no method 'magic'; choose from full"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--report-only", "nowhere"), "--report-only 'nowhere' is no folder"),
        (("--docs", "nowhere"), "--docs 'nowhere' must be a folder"),
        (("--budget", "0.95"), "less than or equal to 0.9"),
        (("--cross-encoder", "./nowhere", "--methods", "cross-encoder:./nowhere"), "no folder './nowhere'"),
        (("--layer", "40"), "--layer 40 is not among those"),
    ],
)
def test_bad_input_is_one_line(arguments, part, tiny_folder, data_file, tmp_path):
    result = bench("--model", tiny_folder, "--data", data_file, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2, result.output
    assert part in result.output
    assert "Traceback" not in result.output


def test_outside_a_checkout_the_way_out_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench("--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "name a file of them with --data" in result.output


def test_a_folder_that_holds_no_run_is_refused(tmp_path):
    result = bench("--report-only", tmp_path)
    assert result.exit_code == 2
    assert "entroprefill bench --out" in result.output


@pytest.mark.slow
@pytest.mark.model
def test_two_questions_by_four_methods_with_the_packaged_models(
    smollm2_folder, embedder_folder, smoke_questions, tmp_path
):
    short = [one for one in smoke_questions if one["id"].startswith("2wikimultihop")][:2]
    file = tmp_path / "short.jsonl"
    file.write_text("".join(json.dumps({**one, "set": "2wiki"}) + "\n" for one in short))
    result = bench(
        "--model",
        smollm2_folder,
        "--embedder",
        embedder_folder,
        "--data",
        file,
        "--out",
        tmp_path / "out",
        "--methods",
        "ours,embedder,second-pass",
        "--max-new-tokens",
        2,
        "--dtype",
        "float32",
    )
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    methods = {one["name"]: one for one in summary["methods"]}
    assert {name: (one["n"], one["failed"]) for name, one in methods.items()} == dict.fromkeys(
        ("full", "ours", "embedder", "second-pass"), (2, 0)
    )
    assert methods["full"]["kl"]["mean"] == 0.0
    assert methods["embedder"]["seconds"]["select"]["mean"] > 0
    assert methods["embedder"]["kept_share"]["mean"] <= 0.5
    assert summary["stamp"]["embedder"]
