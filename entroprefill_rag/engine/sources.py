"""Where a model comes from: a hub id, a folder, a GGUF file, or a small model that came as a package."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from entroprefill_rag.engine.gguf import convert, sha256_of
from entroprefill_rag.engine.source_errors import explain
from entroprefill_rag.errors import ConfigError, ModelSourceError
from entroprefill_rag.models import install_command, installed, path_of
from entroprefill_rag.packaged import DEFAULT_MODEL, PACKAGED

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
# What the tokenizer must be told too, for it to come from the same place as the model.
_SHARED_KWARGS = ("cache_dir", "force_download", "gguf_file", "proxies", "subfolder", "token")
# Above this many parameters, memory matters more than the time that float32 saves on a CPU.
_UPCAST_LIMIT = 1_500_000_000


@dataclass(frozen=True)
class Loaded:
    """A model ready to answer.

    Attributes:
        model: in evaluation mode, on its device, its parameters without gradients.
        tokenizer: from the same place and revision.
        name: what the caller said, or the packaged name that stood in for nothing said.
        revision: commit of a hub model, package and version of a packaged one, hash of a GGUF file; None for a folder.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None


def resolve_model(name: str | os.PathLike[str] | None = None) -> str:
    """Which model is meant: the argument, else ``ENTROPREFILL_MODEL``, else the packaged one if it is installed.

    Raises:
        ModelSourceError: none of the three; the message has the command that installs the packaged one.
    """
    if name is not None and not str(name).strip():
        raise ModelSourceError("The model's name is empty. Give a hub id, a folder, a GGUF file or a packaged name.")
    chosen = str(name) if name is not None else os.environ.get("ENTROPREFILL_MODEL", "").strip()
    if chosen:
        return chosen
    if DEFAULT_MODEL in installed():
        return DEFAULT_MODEL
    raise ModelSourceError(
        "No model was named, ENTROPREFILL_MODEL is not set, and the packaged small model is not installed. "
        f"Name a model (a hub id or a folder), or install the small one: {install_command(DEFAULT_MODEL)}"
    )


def load(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    attn_implementation: str | None = None,
    local_files_only: bool | None = None,
    **kwargs: Any,
) -> Loaded:
    """Load a causal language model and its tokenizer. Folders, files and packaged names never use the network.

    Args:
        name_or_path: hub id, folder, ``.gguf`` file or packaged name; None as in ``resolve_model``. A packaged name
            wins over a folder of that name: write ``./smollm2-135m`` for the folder.
        device: where it runs; None takes CUDA, else MPS, else the CPU. Left to ``device_map`` where that is given.
        dtype: a torch dtype or its name; None or ``"auto"`` takes the checkpoint's. With None, half-precision models
            of up to 1.5 billion parameters run in float32 on CPUs that cannot multiply bfloat16, where it is faster.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run Python that comes with the model.
        allow_pickle: read weights that are pickles, which can run code, where there are no safetensors.
        attn_implementation: attention kernel; None leaves the choice to transformers.
        local_files_only: for hub ids, use the local hub cache only; None follows ``HF_HUB_OFFLINE``.
        **kwargs: passed to the model's ``from_pretrained``.

    Raises:
        ModelSourceError: there is no such model, or it cannot be loaded; the message holds the reason and a way out.
        ConfigError: a device or dtype that is not there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = resolve_model(name_or_path)
    target = None if "device_map" in kwargs else device_of(device)
    wanted = _dtype(dtype)
    place, known_revision = _locate(name)
    on_disk = isinstance(place, Path)
    if on_disk and revision is not None:
        raise ModelSourceError(
            f"revision={revision!r} was given for {name!r}, but only models of the hub have revisions."
        )
    if isinstance(place, Path):
        _check_folder(place, name, allow_pickle=allow_pickle)
    shared: dict[str, Any] = {
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
        "local_files_only": True if on_disk else bool(local_files_only),
    }
    options = dict(kwargs)
    if not allow_pickle:
        options["use_safetensors"] = True
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        if not on_disk and not shared["local_files_only"]:
            ask_hub(name, revision, kwargs)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(place), dtype=wanted or "auto", output_loading_info=True, **shared, **options
        )
        model, report = loaded
        commit = getattr(model.config, "_commit_hash", None)
        shared["revision"] = commit or shared["revision"]
        shared |= {key: kwargs[key] for key in _SHARED_KWARGS if key in kwargs}
        tokenizer = AutoTokenizer.from_pretrained(str(place), **shared)
    except (MemoryError, TypeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise explain(error, name, on_disk=on_disk) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelSourceError(
            f"{name!r} lacks {len(missing)} tensors of a {type(model).__name__} (the first: {missing[0]}), which would "
            "be filled with random numbers. Is it a causal language model, and complete?"
        )
    model = _settle(model, target, dtype)
    return Loaded(model, tokenizer, name, known_revision or commit)


def _locate(name: str) -> tuple[str | Path, str | None]:
    """Folder on disk and revision, or the hub id and None."""
    if name in PACKAGED:
        if PACKAGED[name].kind == "embedder":
            raise ModelSourceError(f"{name!r} is a sentence embedder, not a language model. Try {DEFAULT_MODEL!r}.")
        return path_of(name), PACKAGED[name].revision
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute(), None
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelSourceError(f"{name!r} is a file, but not a .gguf file. Give the folder that holds the model.")
        sha256 = sha256_of(path)
        return convert(path.absolute(), sha256), f"sha256:{sha256}"
    if not _HUB_ID.fullmatch(name) or name.startswith(".") or name.lower().endswith(".gguf"):
        raise ModelSourceError(f"There is no folder or GGUF file {name!r}, and it cannot be a hub id (owner/model).")
    close = [] if "/" in name else difflib.get_close_matches(name.lower(), PACKAGED, n=1, cutoff=0.75)
    if close:
        raise ModelSourceError(f"There is no model or folder {name!r}. Did you mean {close[0]!r}?")
    return name, None


def ask_hub(name: str, revision: str | None = None, kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Ask the hub once for a model that is not in its cache: loading would try each file for half a minute."""
    import huggingface_hub
    from huggingface_hub import constants

    known = huggingface_hub.try_to_load_from_cache(
        name, "config.json", revision=revision, cache_dir=kwargs.get("cache_dir")
    )
    if not constants.HF_HUB_OFFLINE and not isinstance(known, str) and "subfolder" not in kwargs:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=10, token=kwargs.get("token"))


def _check_folder(folder: Path, name: str, *, allow_pickle: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ModelSourceError(
            f"The folder {name!r} holds no config.json, so it is not a model's folder. "
            "Give the folder that `save_pretrained` wrote, or that `hf download` filled."
        )
    if not allow_pickle and not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ModelSourceError(
            f"The folder {name!r} holds its weights only as pickles ({next(folder.glob('*.bin')).name}), and reading a "
            "pickle can run code. Convert them to safetensors, or, if you trust their source, pass allow_pickle=True."
        )


def device_of(device: str | torch.device | None) -> torch.device:
    """A device that is there; for None an accelerator if there is one.

    Raises:
        ConfigError: it is not.
    """
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is no device of torch. Use 'cpu', 'cuda', 'cuda:1' or 'mps'.") from error
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(chosen.type, True)
    if not there or (chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device={str(device)!r} is not available here (CUDA devices seen: {torch.cuda.device_count()}). "
            "Use device='cpu', or install a torch build for your accelerator."
        )
    return chosen


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype if isinstance(dtype, torch.dtype) else None
    found = getattr(torch, _DTYPES.get(dtype, dtype.removeprefix("torch.")), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r} is no floating-point type. Use 'float32', 'bfloat16', 'float16' or 'auto'.")
    return found


def _settle(model: Any, device: torch.device | None, dtype: str | torch.dtype | None) -> Any:
    placed = bool(getattr(model, "hf_device_map", None)) or bool(getattr(model, "is_quantized", False))
    if device is not None and not placed:
        model = model.to(device)
        half = model.dtype in (torch.bfloat16, torch.float16)
        small = sum(weight.numel() for weight in model.parameters()) <= _UPCAST_LIMIT
        if dtype is None and half and small and device.type == "cpu" and not _multiplies_bfloat16():
            model = model.float()
    return model.eval().requires_grad_(False)


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products.

    Without them float32 is faster: SmolLM2-135M on an AVX-512 CPU, 2 threads, prefilled 1,024 tokens in 1.6 s in
    float32 and in 4.7 s in bfloat16, and decoded equally fast.
    """
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)
