"""A diagnosis against both runs computed another way, for every family; and the theorem on the measured constants."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from diagnosis_cases import ASKED, GONE, KEPT, REMOVED, backend, hooks_on, layer_on_retained_keys, reference
from families_for_tests import CASES, FAMILIES, LAYERS, LONG, one_thread, shared
from oracle import reference_attention_rows
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.diagnosis import Diagnosis, diagnose
from entroprefill_rag.diagnosis import constants as constants_module
from entroprefill_rag.errors import ConfigError, RequestError
from entroprefill_rag.rule.stability import value_diameter

families_and_kernels = pytest.mark.parametrize(("name", "kernel"), CASES, ids=["-".join(case) for case in CASES])
STRICT = LOOSE.model_copy(update={"eps_row": 1e-9})
# Both ways run in float32 and add up in another order.
CLOSE = {"rel": 2e-4, "abs": 2e-5}


def diagnosed(name: str, kernel: str) -> Diagnosis:
    layer = FAMILIES[name].prune_layers[0]
    with one_thread(), backend(name, kernel) as made:
        return diagnose(made, ASKED, layer=layer, removed=REMOVED)


@families_and_kernels
def test_distances_and_next_token_are_those_of_masked_full_runs(name: str, kernel: str) -> None:
    found = diagnosed(name, kernel)
    expected = reference(name, kernel, found.layer)
    assert [one.layer for one in found.layers] == list(range(found.layer + 1, LAYERS))
    for one in found.layers:
        distance = expected.distance(one.layer)
        assert one.distance == pytest.approx(float(distance.max()), **CLOSE)
        assert one.last_distance == pytest.approx(float(distance[-1]), **CLOSE)
        norms = expected.full[one.layer][KEPT].double().norm(dim=-1)
        assert one.relative == pytest.approx(float((distance / norms).max()), **CLOSE)
        assert one.distance > 1e-3, "removal changed nothing, so nothing is tested"
    full, pruned = expected.full_logits.double(), expected.pruned_logits.double()
    log_full, log_pruned = full.log_softmax(-1), pruned.log_softmax(-1)
    divergence = torch.nn.functional.kl_div(log_pruned, log_full, log_target=True, reduction="sum")
    token = found.next_token
    assert token.divergence == pytest.approx(float(divergence), rel=2e-3, abs=1e-7)
    assert token.largest_change == pytest.approx(float((full - pruned).abs().max()), **CLOSE)
    assert token.top1_agrees == bool(full.argmax() == pruned.argmax())
    for margin, logits in ((token.margin_full, full), (token.margin_pruned, pruned)):
        top = logits.topk(2).values
        assert margin == pytest.approx(float(top[0] - top[1]), **CLOSE)


@families_and_kernels
def test_the_theorem_holds_on_the_constants_of_the_same_request(name: str, kernel: str) -> None:
    found = diagnosed(name, kernel)
    assert found.fixed_rows_hold
    for one in found.layers:
        slack = 1e-5 * one.distance
        assert one.bound >= one.distance - slack
        assert one.bound_diameter >= one.distance - slack
        assert one.bound_token >= one.distance - slack
        assert one.last_bound_token >= one.last_distance - slack
        assert one.bound_diameter <= one.bound * (1 + 1e-6)
        assert one.fixed_rows.tightest <= 1.0 + 1e-3
        assert one.fixed_rows.tightest <= one.fixed_rows.diameter_tightest * (1 + 1e-6)
    token, last = found.next_token, found.layers[-1]
    assert token.logit_lipschitz is not None, "every family here ends in an RMS norm and a matrix"
    assert token.largest_change <= token.logit_lipschitz * last.last_distance * (1 + 1e-4) + 1e-6
    assert token.largest_change <= token.logit_cap * (1 + 1e-4)
    assert token.logit_bound == pytest.approx(token.logit_lipschitz * last.bound)
    assert token.logit_bound_token == pytest.approx(token.logit_lipschitz * last.last_bound_token)


@families_and_kernels
def test_stretch_and_token_map_are_ratios_of_a_layer_called_with_masked_keys(name: str, kernel: str) -> None:
    found = diagnosed(name, kernel)
    expected = reference(name, kernel, found.layer)
    for one in found.layers:
        out, attention, own, own_attention = layer_on_retained_keys(name, kernel, one.layer)
        added = (out - own).double().norm(dim=-1)
        moved = (attention - own_attention).double().norm(dim=-1)
        clear = moved > 1e-3 * moved.max()
        assert one.token_map >= float((added[clear] / moved[clear]).max()) * (1 - 1e-3)
        assert one.token_map == pytest.approx(float((added[clear] / moved[clear]).max()), rel=0.2)
        before = float(expected.distance(one.layer - 1).max())
        if one.layer == found.layer + 1:
            assert one.lipschitz is None
        else:
            stretched = (own - expected.pruned[one.layer][KEPT]).double().norm(dim=-1)
            assert one.lipschitz == pytest.approx(float(stretched.max()) / before, **CLOSE)


@families_and_kernels
def test_discarded_masses_are_those_of_the_attention_that_the_model_reports(name: str, kernel: str) -> None:
    found = diagnosed(name, kernel)
    rows = torch.tensor(KEPT)
    masses = [
        reference_attention_rows(shared(name, "eager"), LONG.ids, layer, rows)[..., GONE].double().sum(dim=-1)
        for layer in range(LAYERS)
    ]
    assert found.eta == pytest.approx(masses[found.layer].amax(dim=1).tolist(), abs=1e-5)
    for one in found.layers:
        largest = masses[one.layer].amax(dim=1)
        assert one.eta == pytest.approx(largest.tolist(), abs=1e-5)
        assert one.eta_mean == pytest.approx(float(masses[one.layer].mean()), abs=1e-5)
        assert one.drift == pytest.approx(float((largest - masses[found.layer].amax(dim=1)).max()), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "olmo2", "granite", "gemma3"])
def test_value_norms_and_diameters_are_those_of_values_written_out(name: str) -> None:
    found = diagnosed(name, "eager")
    untouched = shared(name, "eager")
    taken: dict[int, torch.Tensor] = {}
    handles = [
        layer.self_attn.v_proj.register_forward_hook(lambda _m, _a, out, index=index: taken.update({index: out[0]}))
        for index, layer in enumerate(untouched.model.layers)
    ]
    with torch.no_grad():
        untouched(input_ids=torch.tensor([LONG.ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    for one in found.layers:
        weight = untouched.model.layers[one.layer].self_attn.o_proj.weight.detach()
        for head in range(4):
            values = taken[one.layer].reshape(LONG.n, 2, 8)[:, head // 2].double()
            through = values @ weight[:, 8 * head : 8 * head + 8].double().T
            assert one.value_norm[head] == pytest.approx(float(through.norm(dim=-1).max()), rel=1e-5)
            apart = value_diameter(through[KEPT], through[GONE])
            assert one.value_diameter[head] == pytest.approx(apart, rel=1e-5)


def test_a_row_beyond_the_fixed_row_bound_is_called_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants_module, "fixed_row_bound", lambda eta, norm: 1e-3 * np.asarray(eta) * norm)
    found = diagnosed("llama", "sdpa")
    assert not found.fixed_rows_hold
    assert all(one.fixed_rows.violations for one in found.layers)
    assert found.words()[0].startswith("BUG: the fixed-row bound")
    assert not any(sentence.startswith("Exact") for sentence in found.words())


@pytest.fixture
def tiny_backend() -> LocalBackend:
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made


def test_what_the_rule_accepts_is_what_is_compared(tiny_backend: LocalBackend) -> None:
    found = diagnose(tiny_backend, request(), LOOSE)
    record = tiny_backend.generate(request(), LOOSE, max_new_tokens=1).audit
    assert found.layer == record.accepted_layer
    assert found.removed == record.dropped_ids
    assert found.retained == found.tokens - record.tokens_removed
    assert not found.forced


def test_where_nothing_is_accepted_it_says_so(tiny_backend: LocalBackend) -> None:
    found = diagnose(tiny_backend, request(), STRICT)
    assert found.layer is None
    assert found.layers == ()
    assert found.next_token is None
    assert found.reason in found.words()[0]
    assert "nothing pruned" in repr(found)
    assert Diagnosis.model_validate_json(found.to_json()) == found


def test_a_layer_can_be_forced_with_the_set_that_the_rule_refused_there(tiny_backend: LocalBackend) -> None:
    refused = LOOSE.model_copy(update={"audit": LOOSE.audit.model_copy(update={"eps_audit": 1e-3})})
    refused = refused.model_copy(update={"audit": refused.audit.model_copy(update={"m_a": 8000})})
    assert diagnose(tiny_backend, request(), refused).layer is None
    found = diagnose(tiny_backend, request(), refused, layer=3)
    assert found.layer == 3
    assert found.forced
    assert found.removed
    assert found.words()[0].startswith("Forced at layer 3")


def test_a_removal_that_cannot_be_is_refused(tiny_backend: LocalBackend) -> None:
    with pytest.raises(ConfigError, match="give `layer` too"):
        diagnose(tiny_backend, request(), LOOSE, removed=["c1"])
    with pytest.raises(ConfigError, match=r"choose from 1\.\.4"):
        diagnose(tiny_backend, request(), LOOSE, layer=5)
    with pytest.raises(RequestError, match="nobody"):
        diagnose(tiny_backend, request(), LOOSE, layer=2, removed=["nobody"])
    with pytest.raises(RequestError, match="none"):
        diagnose(tiny_backend, request(), LOOSE, layer=2, removed=[])
    asked = request()
    kept = asked.chunks[0].model_copy(update={"protected": True})
    asked = asked.model_copy(update={"chunks": (kept, *asked.chunks[1:])})
    with pytest.raises(RequestError, match="protected"):
        diagnose(tiny_backend, asked, LOOSE, layer=2, removed=["c0"])


def test_nothing_is_left_on_the_model_even_after_a_failure(tiny_backend: LocalBackend) -> None:
    before = hooks_on(tiny_backend.model)
    expected = tiny_backend.generate(request(), LOOSE, max_new_tokens=4, do_sample=False).answer
    diagnose(tiny_backend, request(), LOOSE)
    assert hooks_on(tiny_backend.model) == before
    # An attention module that does more than project its heads' outputs.
    doubled = tiny_backend.anatomy.attentions[4].register_forward_hook(lambda _m, _a, out: (2 * out[0], *out[1:]))
    with pytest.raises(ConfigError, match="cannot be diagnosed"):
        diagnose(tiny_backend, request(), LOOSE)
    doubled.remove()
    assert hooks_on(tiny_backend.model) == before
    assert tiny_backend.generate(request(), LOOSE, max_new_tokens=4, do_sample=False).answer == expected


def test_other_requests_on_the_same_model_are_not_disturbed(tiny_backend: LocalBackend) -> None:
    expected = [tiny_backend.generate(request(k), LOOSE, max_new_tokens=6, do_sample=False).answer for k in (4, 6)]
    alone = diagnose(tiny_backend, request(), LOOSE)
    with ThreadPoolExecutor(3) as pool:
        diagnosed_beside = [pool.submit(diagnose, tiny_backend, request(), LOOSE) for _ in range(2)]
        answers = [
            pool.submit(tiny_backend.generate, request(k), LOOSE, max_new_tokens=6, do_sample=False)
            for _ in range(4)
            for k in (4, 6)
        ]
        assert [one.result().answer for one in answers] == expected * 4
        assert all(one.result() == alone for one in diagnosed_beside)


def test_it_is_json_and_words_and_one_row_per_layer(tiny_backend: LocalBackend) -> None:
    found = diagnose(tiny_backend, request(), LOOSE)
    assert Diagnosis.model_validate_json(found.to_json()) == found
    endless = found.model_copy(
        update={"layers": (*found.layers[:-1], found.layers[-1].model_copy(update={"bound": math.inf}))}
    )
    assert Diagnosis.model_validate_json(endless.to_json()).layers[-1].bound == math.inf
    assert len(repr(found)) < 200
    rows = found.rows()
    assert [row["layer"] for row in rows] == [one.layer for one in found.layers]
    assert rows[-1]["ratio"] == pytest.approx(found.layers[-1].bound / found.layers[-1].distance)
    assert rows[-1]["fixed_violations"] == 0
    words = " ".join(found.words())
    assert "estimates, not guarantees" in words
    for sentence in found.words()[1:]:
        assert sentence.split(":")[0] in ("Measured", "Conditional", "Exact")


@pytest.mark.parametrize(
    ("bound", "cap", "margin", "vacuous", "proved", "said"),
    [
        (30.0, 20.0, 1.0, True, False, "no logit can change by more than 20"),
        (10.0, 20.0, 0.05, True, False, "200 times the margin"),
        (10.0, 20.0, 1.0, False, False, "nothing follows"),
        (10.0, 20.0, 21.0, False, True, "the greedy token is the same"),
        (None, None, 1.0, True, False, "no bound on the logits"),
    ],
)
def test_a_bound_that_says_nothing_is_called_vacuous(
    tiny_backend: LocalBackend,
    bound: float | None,
    cap: float | None,
    margin: float,
    vacuous: bool,
    proved: bool,
    said: str,
) -> None:
    found = diagnose(tiny_backend, request(), LOOSE)
    token = found.next_token.model_copy(
        update={
            "logit_bound": bound,
            "logit_bound_token": bound,
            "logit_cap": cap,
            "margin_full": margin,
            "margin_pruned": margin,
            "proved": proved,
        }
    )
    assert token.vacuous == vacuous
    changed = found.model_copy(update={"next_token": token})
    assert ("bound vacuous" in repr(changed)) == vacuous
    assert any(said in sentence for sentence in changed.words())


@pytest.mark.slow
@pytest.mark.model
def test_on_a_real_model_the_theorems_hold_and_the_conditional_bound_is_vacuous(
    smollm2,
    smoke_questions,  # type: ignore[no-untyped-def]
) -> None:
    from entroprefill_rag import Chunk, RagRequest

    asked = smoke_questions[0]
    chunks = [Chunk(id=one["id"], title=one["title"], text=one["text"]) for one in asked["chunks"][:5]]
    with LocalBackend(*smollm2) as made:
        found = diagnose(made, RagRequest(query=asked["question"], chunks=chunks), layer=15, removed=[chunks[1].id])
    assert found.fixed_rows_hold
    for one in found.layers:
        assert one.distance <= one.bound_token <= one.bound
        assert one.last_distance <= one.last_bound_token
    assert found.next_token.vacuous
