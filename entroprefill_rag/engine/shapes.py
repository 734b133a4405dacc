"""A model's sizes from its configuration alone: its modules are made without storage, and no weight is read."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from entroprefill_rag.engine.families import Anatomy, inspect, shape_of
from entroprefill_rag.engine.sources import resolve_model
from entroprefill_rag.errors import ConfigError, ModelSourceError
from entroprefill_rag.models import path_of
from entroprefill_rag.packaged import PACKAGED
from entroprefill_rag.rule.cost import ModelShape

_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def load_config(name: str | None = None, *, file: Path | None = None) -> Any:
    """The configuration of a model: of a folder, a hub id or the packaged model, or from a ``config.json``.

    Args:
        name: as for :func:`.sources.load`; None takes ``ENTROPREFILL_MODEL``, else the packaged model.
        file: a configuration file, instead of a model.

    Raises:
        ModelSourceError: there is none, or it is no configuration of a known model.
    """
    from transformers import AutoConfig

    if file is not None and not file.is_file():
        raise ModelSourceError(f"there is no file {str(file)!r}; --config takes a model's config.json")
    place = str(file) if file is not None else resolve_model(name)
    if file is None and place in PACKAGED:
        place = str(path_of(place))
    try:
        return AutoConfig.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelSourceError(
            f"no model configuration at {place!r}: {reason}. Give a folder with a config.json, a hub id, or "
            "--config FILE"
        ) from error


def outline(config: Any) -> tuple[ModelShape, Anatomy]:
    """Sizes and structure of a model that was never loaded.

    A cached value takes the bytes of the checkpoint's type; two where the configuration names none.

    Args:
        config: of a causal language model of transformers.

    Raises:
        ConfigError: a model that cannot be made from its configuration, for example because its code is not part of
            transformers.
    """
    from transformers import AutoModelForCausalLM

    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, ImportError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"no model can be made from this configuration: {reason}") from error
    finally:
        logger.setLevel(level)
    anatomy = inspect(model)
    if not anatomy.layers:
        raise ConfigError(f"a {type(model).__name__} shows no decoder layers under `.layers`; its cost is not known")
    told = config.to_dict()
    stored = str(told.get("dtype") or told.get("torch_dtype") or "bfloat16")
    size = _DTYPES.get(stored.removeprefix("torch."), 2)
    return replace(shape_of(model, anatomy), bytes_per_value=size, gated_mlp=_gated(anatomy)), anatomy


def _gated(anatomy: Anatomy) -> bool:
    """Whether an MLP has three matrices rather than two; a mixture of experts always has three."""
    config = anatomy.config
    inner = getattr(config, "intermediate_size", None)
    if not inner or getattr(config, "num_experts_per_tok", None):
        return True
    layer: nn.Module = anatomy.layers[-1]
    attention = anatomy.attentions[-1] if anatomy.attentions else nn.Identity()
    inside = {id(weight) for weight in attention.parameters()}
    outside = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2 and id(weight) not in inside)
    return round(outside / (int(config.hidden_size) * int(inner))) != 2
