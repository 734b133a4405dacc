"""Which generation arguments go with a pruned cache, which are answered in full, which are refused."""

import pytest
from transformers import GenerationConfig

from entroprefill_rag import Chunk, PruningConfig, RagRequest
from entroprefill_rag.engine import generation as gen
from entroprefill_rag.engine.job import checked
from entroprefill_rag.errors import ConfigError, RequestError


class Model:
    generation_config = GenerationConfig(eos_token_id=[2, 7])


def why(**arguments):
    reason = gen.why_full(gen.effective(Model(), arguments), arguments)
    return reason.code if reason else None


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"do_sample": True, "top_p": 0.9},
        {"max_new_tokens": 5},
        {"stop_strings": ["."]},
        {"repetition_penalty": 1.2},
    ],
)
def test_greedy_search_and_sampling_go_with_pruning(arguments):
    assert why(**arguments) is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"num_beams": 4}, "generation_mode"),
        ({"prompt_lookup_num_tokens": 3}, "generation_mode"),
        ({"use_cache": False}, "no_cache"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"cache_implementation": "quantized"}, "cache_implementation"),
        ({"prefill_chunk_size": 64}, "prompt_split"),
        ({"guidance_scale": 1.5}, "guidance"),
        ({"custom_generate": "somewhere"}, "custom_generate"),
    ],
)
def test_what_does_not_go_with_a_pruned_cache_is_answered_in_full(arguments, code):
    assert why(**arguments) == code


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
@pytest.mark.parametrize("value", [0, -1, 2.5, float("nan"), True, "8"])
def test_a_length_is_a_whole_number_of_tokens(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
        gen.check_arguments({name: value})


def test_other_things_than_a_request_and_a_configuration_are_refused():
    asked = RagRequest(query="Who sat?", chunks=(Chunk(id="c", text="The cat sat."),))
    assert checked(asked, None) == PruningConfig()
    with pytest.raises(RequestError, match="a RagRequest is needed, got dict"):
        checked({"query": "Who sat?"}, None)
    with pytest.raises(ConfigError, match="a PruningConfig is needed, got dict"):
        checked(asked, {"eps_row": 0.1})


def test_the_models_own_generation_config_counts():
    class Beams:
        generation_config = GenerationConfig(num_beams=3)

    assert gen.why_full(gen.effective(Beams(), {}), {}).code == "generation_mode"


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds", "attention_mask", "past_key_values"])
def test_the_prompt_cannot_be_replaced(name):
    with pytest.raises(ConfigError, match=name):
        gen.check_arguments({name: object()})


def test_several_answers_are_refused():
    with pytest.raises(ConfigError, match="num_return_sequences=3"):
        gen.check_arguments({"num_return_sequences": 3})


def test_the_number_of_new_tokens_comes_from_caller_then_model_then_default():
    assert gen.new_tokens(gen.effective(Model(), {"max_new_tokens": 9}), {"max_new_tokens": 9}) == 9
    assert gen.new_tokens(gen.effective(Model(), {"max_length": 50}), {"max_length": 50}, prompt_tokens=20) == 30
    assert gen.new_tokens(gen.effective(Model(), {}), {}) == gen.DEFAULT_MAX_NEW_TOKENS


@pytest.mark.parametrize(
    ("generated", "cancelled", "expected"),
    [
        ([5, 2], False, "stop"),
        ([5, 7], False, "stop"),
        ([5, 5, 5], False, "length"),
        ([5], False, "stop"),
        ([5], True, "cancelled"),
    ],
)
def test_the_reason_why_it_ended(generated, cancelled, expected):
    config = gen.effective(Model(), {})
    assert gen.finish_reason(generated, config, 3, cancelled) == expected
