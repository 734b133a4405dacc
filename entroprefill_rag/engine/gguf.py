"""GGUF files turned once into an ordinary model folder, which loads in a second and on any supported transformers."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entroprefill_rag.cache import build_folder, cache_dir
from entroprefill_rag.errors import ModelSourceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Part of a converted folder's name: raise it when what a conversion writes changes.
_FORMAT = 1
_CONTROL, _USER_DEFINED = 3, 4
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

logger = logging.getLogger(__name__)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_dir(sha256: str) -> Path:
    """Folder that holds, or would hold, the conversion of the GGUF file with this hash.

    The major version of transformers is part of it: 5.x writes RoPE settings that 4.x silently does not read.
    """
    major = metadata.version("transformers").split(".")[0]
    return cache_dir() / "converted" / f"{sha256[:20]}-format{_FORMAT}-transformers{major}"


def convert(gguf: Path, sha256: str | None = None, *, say: Callable[[str], None] = logger.info) -> Path:
    """Turn a GGUF file into a folder of safetensors, tokenizer and configuration, in the cache; at once if it is there.

    Weights are stored as bfloat16: quantised ones have far fewer significant bits than that. Takes 20-60 s for small
    models the first time.

    Args:
        gguf: the file.
        sha256: its hash in hex, where known; else it is computed.
        say: told, in a line, before something slow begins.

    Returns:
        A folder for ``from_pretrained``.

    Raises:
        ModelSourceError: the packages ``gguf`` and ``accelerate`` are missing, or the file cannot be read.
    """
    folder = converted_dir(sha256 or sha256_of(gguf))
    if folder.is_dir():
        return folder
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelSourceError(
            f"{gguf.name} is a GGUF file, and reading it needs {' and '.join(missing)}: "
            "pip install -e '.[gguf]' in a clone"
        )
    say(f"Converting {gguf.name} (once; about half a minute)")
    return build_folder(folder, lambda partial: _write(gguf, partial))


def _write(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        fields = _fields(gguf)
        _check_supported(gguf, fields)
        loaded = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = _tokenizer(gguf, fields)
    except (MemoryError, ModelSourceError):
        raise
    except Exception as error:  # gguf and transformers raise whatever broken bytes lead them to
        raise ModelSourceError(
            f"{gguf} cannot be read as a GGUF model: {error}. Use a model folder with safetensors, or a hub id."
        ) from error

    # A model that came from GGUF counts as quantised and refuses to be saved: its weights go into one that does not.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    special = {f"{role}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    for name, value in special.items():
        if value is not None:
            setattr(config, name, value)
    config.name_or_path = ""
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in loaded.state_dict().items()}, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        **{name: value for name, value in special.items() if value is not None and name != "unk_token_id"}
    )
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def _fields(gguf: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    wanted = ("general.", "tokenizer.")
    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith(wanted)}
    architecture = fields.get("general.architecture", "")
    length = reader.fields.get(f"{architecture}.context_length")
    return fields | {"context_length": length.contents() if length else None}


def _check_supported(gguf: Path, fields: dict[str, Any]) -> None:
    version = metadata.version("transformers")
    if int(version.split(".")[0]) < 5 and fields.get("general.architecture", "").startswith("gemma"):
        raise ModelSourceError(
            f"{gguf.name} holds a Gemma, whose tokenizer transformers {version} rebuilds wrongly "
            "('user' becomes 'us' + 'er'). Use transformers 5, or a model folder with its own tokenizer."
        )


def _tokenizer(gguf: Path, fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The file's tokenizer, with the special tokens, template and length the file states.

    Byte-level BPE is built here from the file's own tables: transformers drops SmolLM2's splitting of digits, which
    changes the ids of runs of spaces before numbers, and 4.57 puts a BOS in front and names it as EOS.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if fields.get("tokenizer.ggml.model") == "gpt2" and fields.get("tokenizer.ggml.pre") in ("smollm", "gpt-2"):
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
            tokenizer_object=_byte_level_bpe(fields),
            clean_up_tokenization_spaces=False,
            # By default 4.57 adds token_type_ids, which `generate` then refuses.
            model_input_names=["input_ids", "attention_mask"],
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    for role, key in _ROLES.items():
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            setattr(tokenizer, f"{role}_token", tokens[index])
    if fields.get("tokenizer.chat_template"):
        tokenizer.chat_template = fields["tokenizer.chat_template"]
    if fields["context_length"]:
        tokenizer.model_max_length = fields["context_length"]
    return tokenizer


def _byte_level_bpe(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    split: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if fields["tokenizer.ggml.pre"] == "smollm":
        split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    return tokenizer
