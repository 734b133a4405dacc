"""What the classes of this adapter have in common: which model, which limits, which prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, SkipValidation

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.integrations._shared import BackendSource, restyled
from entroprefill_rag.integrations.langchain.audit import IncludeRecord
from entroprefill_rag.integrations.langchain.templates import as_style

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.engine.prompt_style import PromptStyle

# Standard arguments of chat models that mean nothing for weights on this machine.
_MOOT = frozenset({"api_key", "base_url", "max_retries"})
_REFUSED = ("tools", "tool_choice", "functions", "response_format")


class PruningSettings(BaseModel):
    """A local model and how it prunes. Constructing loads nothing.

    Raises:
        ConfigError: an argument that is not known, or both a backend and a model.
        TemplateError: a prompt that does not put all documents before the question.
    """

    backend: SkipValidation[Any] = Field(
        default=None, exclude=True, repr=False, description="A LocalBackend that is loaded already."
    )
    model: str | None = Field(
        default=None,
        description="Hub id, folder, GGUF file or packaged name. None takes the default backend, ENTROPREFILL_MODEL, "
        "then the packaged small model, on first use.",
    )
    pruning: PruningConfig = Field(default_factory=PruningConfig, repr=False, description="Limits and audit.")
    prompt: SkipValidation[Any] = Field(
        default=None,
        repr=False,
        description="Text or LangChain template with {context} before {input}, or a PromptStyle. None: the backend's.",
    )
    title_key: str | None = Field(
        default=None, description="Metadata key shown as a document's title; None shows no metadata at all."
    )

    def __init__(self, **data: Any) -> None:
        known = set(type(self).model_fields) | _MOOT
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"{type(self).__name__} has no argument {unknown[0]!r}; it has {', '.join(sorted(known - _MOOT))}"
            )
        # Before pydantic, which would wrap these errors in one of its own.
        backend, model = data.get("backend"), data.get("model")
        if not isinstance(backend, BackendSource):
            data["backend"] = BackendSource(backend, model)
        data["prompt"] = as_style(data.get("prompt"))
        super().__init__(**{name: value for name, value in data.items() if name not in _MOOT})

    @property
    def source(self) -> BackendSource:
        """Where the model comes from; ``source.loaded`` says whether it is there."""
        source: BackendSource = self.backend
        return source

    def _styled(self, style: PromptStyle | None = None) -> LocalBackend:
        """The backend, loaded now if need be, with this prompt's words."""
        return restyled(self.source.get(), style or self.prompt)


class GenerationSettings(PruningSettings):
    """A local model that answers, and how it writes."""

    temperature: float | None = Field(
        default=None, ge=0.0, description="0 takes the likeliest token; None leaves it to the model's own settings."
    )
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens generated; None: the model's, or 256.")
    stop: list[str] | None = Field(default=None, description="Texts that end an answer; they are not shown.")
    timeout: float | None = Field(default=None, gt=0.0, description="Seconds after which an answer is cut off.")
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments for the model's own `generate`."
    )
    include_record: IncludeRecord = Field(
        default="summary", description="'full' puts the full record beside the summary; see `get_audit`."
    )

    def _generation(self, stop: list[str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for ``generate``; what a call gives comes before what the object was made with.

        Raises:
            ConfigError: tools or structured output are asked for.
        """
        asked = {name: value for name, value in given.items() if name not in _MOOT and name != "stream"}
        for name in _REFUSED:
            if asked.pop(name, None):
                raise ConfigError(f"{name} is not supported: this chat model writes text; see the README on agents")
        temperature = asked.pop("temperature", self.temperature)
        max_tokens = asked.pop("max_tokens", self.max_tokens)
        timeout = asked.pop("timeout", self.timeout)
        arguments: dict[str, Any] = {**self.model_kwargs, **asked}
        if temperature is not None:
            arguments |= {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
        if max_tokens is not None:
            arguments["max_new_tokens"] = int(max_tokens)
        if timeout is not None:
            arguments["max_time"] = float(timeout)
        if stops := self._stops(stop):
            arguments["stop_strings"] = stops
        return arguments

    def _stops(self, stop: list[str] | None) -> list[str]:
        return [text for text in (self.stop or [] if stop is None else stop) if text]
