"""Certificates from real forward passes: a tiny random model, and the packaged one; and the command."""

import json

import pytest
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import LocalBackend, PruningConfig
from entroprefill_rag.certificate.requests import HeldOut
from entroprefill_rag.certificate.result import Certificate
from entroprefill_rag.certificate.run import certify
from entroprefill_rag.config import PromptRows
from entroprefill_rag.errors import CertificateError, ConfigError

# The same requests again and again would be no workload; for the path from request to certificate they do.
GRID = ({"m0": 4}, {"m0": 2}, {"m0": 2, "target_saving": 0.6, "max_saving": 0.9})
BASE = LOOSE


@pytest.fixture(scope="module")
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny", profile=False) as made:
        yield made


def held_out(count=6, gold=(), **more):
    asked = [request(words=3 + at % 3) for at in range(count)]
    return tuple(HeldOut(one, gold=gold, line=at + 1, **more) for at, one in enumerate(asked))


def run(backend, requests=None, **more):
    wanted = {"alpha": 0.9, "delta": 0.2, "loss": "gold_lost", "base": BASE, "grid": GRID}
    return certify(backend, held_out(gold=("c0",)) if requests is None else requests, **{**wanted, **more})


def test_of_the_certified_configurations_the_one_that_saves_most_is_chosen(backend):
    found = run(backend, loss="discarded_mass", alpha=0.95)
    assert found.certified == 3
    assert all(one.measured.pruned for one in found.grid)
    saved = [one.measured.saved_work for one in found.grid]
    assert saved[0] < saved[1]
    assert found.chosen == saved.index(max(saved))
    chosen = found.pruning_config()
    assert chosen.m0 == 2
    assert chosen.layers == BASE.layers
    assert "certified" not in found.claim.not_claimed[0]
    assert "at least 0.8 over the draw of the 6 requests" in found.claim.probabilistic
    assert found.fingerprint == backend.model_info.fingerprint


def test_the_loss_is_that_of_the_record(backend):
    asked = held_out(1)
    found = run(backend, asked, loss="discarded_mass", alpha=0.95, grid=GRID[:1])
    record = backend.prune(asked[0].request, found.pruning_config()).audit
    audit = next(one for one in record.trial.audits if one.observer == "suffix_rows")
    seen = found.grid[0].measured
    assert seen.mean_loss == pytest.approx(max(audit.eta_hat))
    share = record.tokens_removed * (record.model.layers - 1 - record.accepted_layer)
    assert seen.saved_work == pytest.approx(share / (record.prompt.tokens * record.model.layers))


def test_gold_lost_counts_what_the_records_dropped(backend):
    plain = held_out(6)
    dropped = [backend.prune(one.request, BASE.model_copy(update={"m0": 4})).dropped_ids for one in plain]
    assert all(dropped)
    kept = run(backend, tuple(HeldOut(one.request, ("c4", "c3", "c2", "c1", "c0"), True) for one in plain))
    assert kept.grid[0].measured.mean_loss == 0.0
    lost = run(backend, tuple(HeldOut(one.request, ids) for one, ids in zip(plain, dropped, strict=True)))
    assert lost.grid[0].measured.mean_loss == 1.0
    assert (lost.certified, lost.chosen, lost.config) == (0, None, None)
    assert lost.claim.probabilistic is None
    assert [one.measured for one in lost.grid[1:]] == [None, None]


def test_testing_ends_at_the_first_configuration_that_is_not_certified(backend):
    seen = []
    plain = held_out(6)
    dropped = [backend.prune(one.request, BASE.model_copy(update={"m0": 4})).dropped_ids for one in plain]
    asked = tuple(HeldOut(one.request, ids) for one, ids in zip(plain, dropped, strict=True))
    grid = ({"m0": 5}, {"m0": 4}, {"m0": 2})  # five chunks, five must stay: nothing is removed
    found = run(backend, asked, grid=grid, progress=lambda done, total: seen.append((done, total)))
    assert [one.certified for one in found.grid] == [True, False, False]
    assert found.grid[0].measured.pruned == 0
    assert found.grid[0].measured.mean_loss == 0.0  # answered in full
    assert found.grid[2].measured is None
    assert seen[-2:] == [(11, 18), (18, 18)]


def test_answers_are_compared_with_those_of_a_full_prefill(backend):
    asked = held_out(4)
    found = run(backend, asked, loss="answer_changed", alpha=0.9, grid=({"m0": 5}, {"m0": 2}), max_new_tokens=6)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    changed = [
        backend.generate(one.request, BASE, **greedy).answer
        != backend.generate(one.request, PruningConfig(enabled=False), **greedy).answer
        for one in asked
    ]
    assert found.grid[1].measured.mean_loss == pytest.approx(sum(changed) / 4)
    assert found.max_new_tokens == 6


def test_requests_without_gold_or_too_long_are_left_out_and_counted(backend):
    asked = (*held_out(6, gold=("c0",)), *held_out(2), HeldOut(request(chunks=40, words=20), ("c0",)))
    found = run(backend, asked)
    assert found.requests.n == 6
    assert found.requests.left_out == {"no gold chunk": 2, "longer than the model's positions": 1}


def test_what_was_measured_is_not_measured_again(backend, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    first = run(backend, resume=file, seed=5)
    assert "word" not in file.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "prune", None)
        again = run(backend, resume=file, seed=5)
    assert again.grid == first.grid
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "prune", None)
        with pytest.raises(TypeError):  # another seed is another setup
            run(backend, resume=file, seed=6)


def test_a_seed_gives_every_run_draws_of_its_own_and_repeats_them(backend):
    base = BASE.model_copy(update={"audit": BASE.audit.model_copy(update={"method": "sample"})})
    first = run(backend, base=base, seed=7)
    assert all(one.measured.pruned for one in first.grid if one.measured)  # none refused as a reuse of draws
    with LocalBackend(model(), tokenizer(), name="tiny", profile=False) as other:
        assert run(other, base=base, seed=7).grid == first.grid
    assert first.pruning_config().audit.seed is None
    with pytest.raises(CertificateError, match="draws had been seen before"):  # not taken for an answer in full
        run(backend, base=base.model_copy(update={"alpha": 0.02}), seed=7)


def test_losses_that_cannot_be_measured_are_refused(backend):
    with pytest.raises(CertificateError, match="line 1 has no label"):
        run(backend, tuple(HeldOut(one.request, line=one.line) for one in held_out(6)))
    sampled = BASE.model_copy(update={"audit": BASE.audit.model_copy(update={"method": "sample"})})
    with pytest.raises(CertificateError, match="needs all suffix rows"):
        run(backend, loss="discarded_mass", base=sampled)
    others = BASE.model_copy(update={"audit": BASE.audit.model_copy(update={"observers": (PromptRows(),)})})
    with pytest.raises(CertificateError, match="has none; add suffix_rows"):
        run(backend, loss="discarded_mass", base=others)


def test_a_model_that_cannot_be_read_is_refused():
    made = model()
    made.model.config._attn_implementation = "paged|sdpa"
    with LocalBackend(made, tokenizer()) as backend, pytest.raises(ConfigError):
        run(backend)


@pytest.fixture
def command(monkeypatch):
    typer = pytest.importorskip("typer.testing")
    from entroprefill_rag.cli import app
    from entroprefill_rag.engine import backend as engine

    monkeypatch.setattr(
        engine.LocalBackend,
        "from_pretrained",
        classmethod(lambda cls, name, profile=None, **_: cls(model(), tokenizer(), name="t", profile=profile or False)),
    )
    return lambda *words: typer.CliRunner().invoke(app, ["certify", *map(str, words)])


@pytest.fixture
def files(tmp_path):
    """Requests, grid and configuration as files."""
    lines = [json.dumps({**one.request.model_dump(mode="json"), "gold": ["c0"]}) for one in held_out(6)]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    (tmp_path / "grid.json").write_text(json.dumps(GRID))
    (tmp_path / "base.json").write_text(BASE.model_dump_json())
    return tmp_path


def test_the_command_writes_a_certificate_and_a_configuration_that_ask_takes(command, files):
    from entroprefill_rag.cli.inputs import load_config

    words = ["--requests", files / "r.jsonl", "--grid", files / "grid.json", "--config", files / "base.json"]
    words += ["--alpha", "0.95", "--delta", "0.2", "--loss", "discarded_mass"]
    found = command(*words, "--out", files / "c.json", "--config-out", files / "chosen.json")
    assert found.exit_code == 0, found.output
    made = Certificate.read(files / "c.json")
    assert made.chosen is not None
    assert load_config(files / "chosen.json", enabled=True, seed=None) == made.pruning_config()
    assert "Not claimed: anything about a single request" in found.output
    shown = command(*words, "--json")
    data = json.loads(shown.output[shown.output.index("{") : shown.output.rindex("}") + 1])
    assert data["certified"] == made.certified


def test_a_certificate_goes_into_the_profile_it_was_measured_with(command, files):
    from profile_cases import profile

    from entroprefill_rag.calibration.profile import ModelProfile

    file = files / "p.json"
    file.write_text(profile().to_json())
    words = ["--requests", files / "r.jsonl", "--grid", files / "grid.json", "--config", files / "base.json"]
    words += ["--alpha", "0.95", "--delta", "0.2", "--loss", "discarded_mass", "--into", file]
    assert command(*words).exit_code == 0
    found = ModelProfile.read(file)
    assert found.name == profile().name
    assert [one.profile for one in found.certificates] == [found.name]
    assert command(*words).exit_code == 0
    assert len(ModelProfile.read(file).certificates) == 2
    other = command(*words, "--profile", files / "other.json")
    assert other.exit_code == 2
    assert "name two profiles" in " ".join(other.output.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "6 requests can certify nothing below alpha = 0.3931"),
        (["--loss", "nonsense"], "choose from answer_changed, gold_lost, discarded_mass"),
        (["--alpha", "2"], "alpha must lie between 0 and 1"),
        (["--out", "/nowhere/at/all"], "--out"),
    ],
)
def test_the_command_refuses_before_it_loads_a_model(command, files, monkeypatch, words, why):
    from entroprefill_rag.engine import backend as engine

    monkeypatch.setattr(engine.LocalBackend, "from_pretrained", None)
    found = command("--requests", files / "r.jsonl", *words)
    assert found.exit_code == 2
    assert why in " ".join(found.output.split())


@pytest.mark.model
@pytest.mark.slow
def test_the_packaged_model_gets_a_certificate_on_real_questions(smollm2, smoke_questions, tmp_path):
    from entroprefill_rag.certificate.requests import read_requests

    short = sorted(smoke_questions, key=lambda one: one["meta"]["context_tokens"]["smollm2"])
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, short[:4])), encoding="utf-8")
    asked = read_requests(tmp_path / "r.jsonl")
    grid = ({"eps_row": 0.3, "audit": {"eps_audit": 0.3}},)
    with LocalBackend(*smollm2, name="smollm2-135m") as backend:
        found = certify(backend, asked, alpha=0.9, delta=0.2, loss="answer_changed", grid=grid, max_new_tokens=3)
        assert found.profile == backend.profile.name
    assert found.requests.n == 4
    assert found.grid[0].measured.pruned > 0
    assert found.grid[0].measured.saved_work > 0
