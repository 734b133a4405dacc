"""`entroprefill plan` and `observers`: predictions from a configuration alone, and the table of observers."""

import json

import pytest
from typer.testing import CliRunner

from entroprefill_rag.cli import app


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    import tiny

    folder = tmp_path_factory.mktemp("config")
    tiny.model().config.save_pretrained(folder)
    return folder / "config.json"


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_plan_needs_a_configuration_and_no_weights(config_file):
    done = run("plan", "--config", config_file, "--tokens", 512, "--layer", 2, "--bandwidth", 10, "--tflops", 1)
    assert done.exit_code == 0, done.output
    for words in ("KV cache", "pages of 16", "transfer time", "predicted speed-up", "largest kept share"):
        assert words in done.stdout
    by_folder = run("plan", "--model", config_file.parent, "--tokens", 512, "--layer", 2, "--json")
    by_file = run("plan", "--config", config_file, "--tokens", 512, "--layer", 2, "--json")
    assert json.loads(by_folder.stdout) == json.loads(by_file.stdout)


def test_the_json_of_a_plan_holds_what_the_table_shows(config_file):
    told = json.loads(
        run("plan", "--config", config_file, "--tokens", 580, "--layer", 2, "--keep", 0.25, "--json").stdout
    )
    assert told["model"]["layers"] == 6
    assert told["why_not"] is None
    assert told["plan"]["kept_tokens"] == 80 + 125
    assert told["plan"]["speedup"] == told["plan"]["full_flops"] / told["plan"]["pruned_flops"]


def test_fewer_accepted_requests_gain_less(config_file):
    def expected(rate):
        arguments = ("plan", "--config", config_file, "--tokens", 512, "--layer", 2, "--json", "--accept-rate", rate)
        return json.loads(run(*arguments).stdout)["plan"]["expected_speedup"]

    assert expected(0) < 1 < expected(0.5) < expected(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layer", 5), "layer 5 cannot be accepted"),
        (("--layer", 2, "--bandwidth", 0), "speeds above 0"),
        (("--layer", 2, "--other-tokens", 511), "at least one token a chunk"),
        (("--layer", 2, "--model", "x"), "already names the model"),
    ],
)
def test_what_cannot_be_planned_is_bad_input_in_one_line(config_file, arguments, words):
    done = run("plan", "--config", config_file, "--tokens", 512, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_table_of_observers_is_printed_and_told_as_json():
    done = run("observers")
    assert done.exit_code == 0, done.output
    assert "1039 1455 1709 1986" in done.stdout
    cells = json.loads(run("observers", "--json", "--delta", 0.01).stdout)
    least = [one["m"] for one in cells if one["bound"] == "hoeffding" and one["eta_hat"] == 0 and one["m"]]
    assert min(least) > 65, "a smaller delta takes more observers"
    assert run("observers", "--delta", 1).exit_code == 2
