"""What a caller hands in: ordered chunks, the protected instruction and query, and the history."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, field_validator, model_validator


class Chunk(BaseModel):
    """One retrieved passage: the unit that is kept or removed whole (algorithm, section 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: StrictStr = Field(min_length=1, description="Identifier, unique within the request; comes back in the record.")
    text: StrictStr = Field(description="The text the model reads. May be empty; an empty chunk is protected.")
    title: StrictStr = Field(default="", description="Shown in the chunk's header line, which goes with the chunk.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Carried along, never shown to the model.")
    protected: bool = Field(default=False, description="Never remove this chunk.")


class Turn(BaseModel):
    """One earlier turn of the conversation, placed before the documents or in its own turn, never after the query."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["user", "assistant"]
    content: StrictStr


class RagRequest(BaseModel):
    """A question over ordered chunks.

    ``history`` accepts :class:`Turn` objects, ``{"role", "content"}`` mappings or ``(role, content)`` pairs.

    Raises:
        pydantic.ValidationError: empty query, non-string text, duplicate chunk ids, an unknown role.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    instruction: StrictStr = Field(default="", description="What the model is told to do; protected. Empty: default.")
    chunks: tuple[Chunk, ...] = Field(default=(), description="Retrieved passages in the order they are shown.")
    query: StrictStr = Field(description="The user's question; protected, and after every chunk.")
    history: tuple[Turn, ...] = Field(default=(), description="Earlier turns, oldest first; protected.")

    @field_validator("history", mode="before")
    @classmethod
    def _accept_pairs(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(
                {"role": turn[0], "content": turn[1]} if isinstance(turn, (list, tuple)) and len(turn) == 2 else turn
                for turn in value
            )
        return value

    @field_validator("query")
    @classmethod
    def _query_says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the query is empty; pass the question to answer in `query`")
        return value

    @model_validator(mode="after")
    def _ids_are_unique(self) -> RagRequest:
        twice = [chunk_id for chunk_id, count in Counter(chunk.id for chunk in self.chunks).items() if count > 1]
        if twice:
            raise ValueError(
                f"chunk ids must be unique, but {twice[:5]!r} occur more than once; number them, for example "
                "f'{id}#{position}'"
            )
        return self
