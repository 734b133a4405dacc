"""A model's sizes come from its configuration alone, and are those of the model when it is loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny
import torch

from entroprefill_rag.engine.families import inspect, shape_of
from entroprefill_rag.engine.shapes import load_config, outline
from entroprefill_rag.errors import ConfigError, ModelSourceError


def test_the_outline_of_a_configuration_is_the_shape_of_its_model():
    made = tiny.model()
    shape, anatomy = outline(made.config)
    assert replace(shape, bytes_per_value=4) == shape_of(made, inspect(made))
    assert shape.bytes_per_value == 2, "the configuration names no type"
    assert anatomy.why_not is None
    assert {weight.device.type for weight in anatomy.decoder.parameters()} == {"meta"}


def test_a_folder_without_weights_is_enough(tmp_path):
    tiny.model().config.save_pretrained(tmp_path)
    assert outline(load_config(str(tmp_path)))[0].layers == 6
    assert outline(load_config(file=tmp_path / "config.json"))[0].query_heads == 4


def test_stored_half_precision_counts_two_bytes(tmp_path):
    config = tiny.model().config
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    data = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("dtype", "torch_dtype")}
    file.write_text(json.dumps({**data, "torch_dtype": "bfloat16"}))
    assert outline(load_config(str(tmp_path)))[0].bytes_per_value == torch.bfloat16.itemsize


def test_an_mlp_of_two_matrices_counts_two():
    from transformers import PhiConfig

    config = PhiConfig(vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    shape, _ = outline(config)
    assert not shape.gated_mlp
    assert shape.linear_flops == 2 * (4 * 32 * 32 + 2 * 32 * 128)


@pytest.mark.parametrize("text", ["not json", "{}", '{"model_type": "unheard-of"}'])
def test_what_is_no_configuration_is_refused_with_a_way_out(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelSourceError, match=r"--config FILE"):
        load_config(file=file)
    with pytest.raises(ModelSourceError, match="no file"):
        load_config(file=tmp_path / "none.json")


def test_a_model_that_is_no_decoder_is_refused():
    from transformers import CLIPConfig

    with pytest.raises(ConfigError):
        outline(CLIPConfig())
