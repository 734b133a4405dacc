"""Calibration on a real forward pass, and the command."""

import json

import numpy as np
import pytest
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import Chunk, LocalBackend, RagRequest
from entroprefill_rag.calibration.measure import measure
from entroprefill_rag.calibration.profile import ModelProfile, find
from entroprefill_rag.calibration.run import calibrate, training_questions
from entroprefill_rag.errors import ConfigError, ProfileError


@pytest.fixture(scope="module")
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made


def test_what_is_measured_is_what_a_trial_reports(backend):
    seen = measure(backend, request(), [1])
    # A streak that no layer reaches: all of them are tried.
    config = LOOSE.model_copy(update={"layers": seen.layers, "head_weights": "uniform", "zeta": 1.0, "streak": 9})
    record = backend.prune(request(), config).audit
    assert seen.layers == record.layers == (1, 2, 3, 4)
    for trial, mean in zip(record.trials, seen.mean(), strict=True):
        assert trial.doc_mass == pytest.approx(mean.sum(axis=-1).mean(), rel=1e-6)
        assert trial.pooled_mass == pytest.approx(mean.mean(axis=0), rel=1e-6)
    assert np.allclose(seen.last()[0], seen.masses[0][:, -1])
    shares, mass = seen.excess()
    assert (mass <= 1).all()
    assert shares * mass[..., None] == pytest.approx(np.stack(seen.question) - np.stack(seen.before), abs=1e-9)
    assert not np.allclose(seen.before, 0)


def test_the_packaged_passages_are_the_default_and_sources_exclude_each_other(tmp_path):
    questions, source = training_questions(count=20)
    assert (len(questions), source) == (20, "packaged")
    with pytest.raises(ProfileError, match="not both"):
        training_questions(docs=tmp_path, requests=tmp_path)


def test_requests_give_questions_of_their_own_chunks(tmp_path):
    file = tmp_path / "requests.jsonl"
    texts = [
        f"The old harbour number {i} was closed in {1900 + i}. A ferry with {i} seats goes there now." for i in range(6)
    ]
    asked = RagRequest(chunks=[Chunk(id=f"x{i}", text=text) for i, text in enumerate(texts)], query="Never used?")
    file.write_text(f"{asked.model_dump_json()}\n\n", encoding="utf-8")
    questions, source = training_questions(requests=file, count=10)
    assert source == "requests"
    assert questions
    assert all("Never" not in one.request.query for one in questions)


def test_a_line_that_is_no_request_is_named_without_its_text(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"secret": 1}\n', encoding="utf-8")
    with pytest.raises(ProfileError, match="line 1 of") as caught:
        training_questions(requests=file)
    assert "secret" not in str(caught.value)


def test_documents_give_questions(tmp_path):
    pytest.importorskip("semantic_text_splitter")
    text = "\n\n".join(
        f"The mill at bend {i} ground {i * 7} sacks. Its miller kept {i + 3} cats and a goat." for i in range(60)
    )
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    questions, source = training_questions(docs=tmp_path, count=10)
    assert (len(questions), source) == (10, "documents")


def short_questions(count):
    """Training questions of a few tokens, so that a byte-level model reads them fast."""
    pool = [
        Chunk(id=str(i), title=f"t{i}", text=f"A boat of {i} men left in 18{i:02d}. It found {i + 2} big whales there.")
        for i in range(40)
    ]
    from entroprefill_rag.calibration.questions import make_questions

    return make_questions([pool], count, chunks=4)


@pytest.mark.slow
def test_calibrating_a_random_model_says_that_it_finds_nothing_or_gives_a_sound_profile(backend):
    seen = []
    questions = short_questions(24)
    try:
        found = calibrate(backend, questions, progress=lambda done, total: seen.append((done, total)))
    except ProfileError as error:
        assert "better than chance" in str(error)  # noqa: PT017
    else:
        assert found.fingerprints == (backend.model_info.fingerprint,)
        assert found.training.questions == 24
    assert seen[0] == (0, 24)
    assert seen[-1] == (24, 24)


def test_a_model_that_cannot_be_read_is_refused():
    made = model()
    made.model.config._attn_implementation = "paged|sdpa"
    with LocalBackend(made, tokenizer()) as backend, pytest.raises(ConfigError):
        calibrate(backend, short_questions(1))


@pytest.mark.model
@pytest.mark.slow
def test_the_packaged_model_has_a_shipped_profile_that_is_used_by_itself(smollm2):
    made, words = smollm2
    with LocalBackend(made, words, name="smollm2-135m") as backend:
        assert backend.profile is not None
        assert backend.profile == find(backend.model_info.fingerprint)
        assert backend.profile.training.questions >= 60
        record = backend.prune(request(chunks=6, words=20)).audit
    assert record.layers == backend.profile.layers
    assert {trial.weighting for trial in record.trials} == {"profile"}


def test_the_command_refuses_before_it_loads_a_model(tmp_path, capsys):
    typer = pytest.importorskip("typer.testing")
    from entroprefill_rag.cli import app

    run = typer.CliRunner()
    found = run.invoke(app, ["calibrate", "--out", str(tmp_path / "none" / "p.json")])
    assert found.exit_code == 2
    assert "--out" in found.output
    found = run.invoke(app, ["calibrate", "--docs", str(tmp_path), "--requests", str(tmp_path)])
    assert found.exit_code == 2
    assert "not both" in found.output
    found = run.invoke(app, ["calibrate", "--docs", str(tmp_path / "missing")])
    assert found.exit_code == 2


def test_the_command_writes_a_profile_and_shows_it(tmp_path, monkeypatch):
    typer = pytest.importorskip("typer.testing")
    from profile_cases import profile

    from entroprefill_rag.calibration import run as module
    from entroprefill_rag.cli import app
    from entroprefill_rag.engine import backend as engine

    monkeypatch.setattr(
        engine.LocalBackend,
        "from_pretrained",
        classmethod(lambda cls, name, **_: cls(model(), tokenizer(), name="tiny", profile=False)),
    )
    monkeypatch.setattr(module, "calibrate", lambda *_, **__: profile())
    file = tmp_path / "p.json"
    found = typer.CliRunner().invoke(app, ["calibrate", "--out", str(file), "--questions", "20"])
    assert found.exit_code == 0, found.output
    assert ModelProfile.read(file) == profile()
    assert "Monitored layers: 2, 3" in found.output
    shown = typer.CliRunner().invoke(app, ["calibrate", "--json", "--questions", "20"])
    assert json.loads(shown.output[shown.output.index("{") : shown.output.rindex("}") + 1])["model"] == "tiny"
