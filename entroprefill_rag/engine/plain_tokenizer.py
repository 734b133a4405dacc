"""The model's tokenizer without its control tokens: text goes in, and only text comes out (section 1).

``split_special_tokens=True`` would not do: on fast tokenizers it sets a flag on an object that all threads share, and
it still matches added tokens that are not marked special (``<think>``, ``<tool_call>``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from entroprefill_rag.errors import ConfigError


class PlainTokenizer:
    """Encodes text with the model and the rules of a tokenizer, but none of its control tokens.

    Reads the tokenizer once and never changes it; afterwards any number of threads may encode. Truncation, padding and
    other state that calls leave behind on the tokenizer has no effect here.

    Args:
        tokenizer: a tokenizer of transformers, fast or slow.

    Attributes:
        controls: control tokens by text: all special tokens, and added tokens that look like markup.
        flags: how added tokens match, by text.

    Raises:
        ConfigError: a tokenizer that does not say which tokens are special.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        try:
            added: dict[int, AddedToken] = dict(tokenizer.added_tokens_decoder)
            special = {token_id for token_id in tokenizer.all_special_ids if token_id is not None}
        except (AttributeError, NotImplementedError) as error:
            raise ConfigError(
                f"{type(tokenizer).__name__} does not say which of its tokens are special, so user text could not be "
                "kept apart from them; load the tokenizer with AutoTokenizer from a folder that holds tokenizer.json"
            ) from error
        special |= {token_id for token_id, token in added.items() if token.special or not _is_words(token.content)}
        names = tokenizer.convert_ids_to_tokens(sorted(special))
        self.controls: dict[str, int] = {
            str(name): token_id for name, token_id in zip(names, sorted(special), strict=True)
        }
        self.flags: dict[str, AddedToken] = {token.content: token for token in added.values()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = backend if isinstance(backend, Tokenizer) else None
        self._plain = self._copy("normalizer", "pre_tokenizer", "decoder")
        self._renamed: dict[int, int] = {}
        if self._plain is not None and self._backend is not None:
            words = [token for token_id, token in added.items() if token_id not in special]
            self._plain.add_tokens(words)
            for word in words:
                # An added word that is not in the model's vocabulary is numbered anew.
                here, there = self._plain.token_to_id(word.content), self._backend.token_to_id(word.content)
                if here is not None and there is not None and here != there:
                    self._renamed[here] = there

    def _copy(self, *parts: str) -> Tokenizer | None:
        """A tokenizer over the same model (shared, not copied) with only these parts of the pipeline."""
        if self._backend is None:
            return None
        copy = Tokenizer(self._backend.model)
        for part in parts:
            value = getattr(self._backend, part)
            if value is not None:
                setattr(copy, part, value)
        return copy

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text, each begun as the tokenizer begins a text; nothing is added before or after."""
        if self._plain is None:
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            return [self._tokenizer.encode(text, **options) for text in texts]
        rows = [encoding.ids for encoding in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [[self._renamed.get(token_id, token_id) for token_id in ids] for ids in rows] if self._renamed else rows

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included, nothing tidied up."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def leaves_out(self, character: str) -> bool:
        """Whether the tokenizer's own rules drop the character, rather than its vocabulary lacking it."""
        if self._plain is None:
            return character.isspace()
        normalizer, splitter = self._plain.normalizer, self._plain.pre_tokenizer
        text = normalizer.normalize_str(character) if normalizer is not None else character
        return not text or (splitter is not None and not splitter.pre_tokenize_str(text))

    @cached_property
    def bos(self) -> tuple[int, ...]:
        """Ids that the tokenizer by itself puts before a text."""
        alone = self.encode(["a"])[0]
        whole = self._copy("normalizer", "pre_tokenizer", "post_processor")
        if whole is not None:
            marked = whole.encode("a", add_special_tokens=True).ids
        else:
            marked = self._tokenizer.build_inputs_with_special_tokens(alone)
        return tuple(marked[: marked.index(alone[0])]) if alone and alone[0] in marked else ()

    @cached_property
    def begins_after_control(self) -> bool:
        """Whether the tokenizer begins anew after a control token (old Llama), not only at the start of a text."""
        whole = self._copy("normalizer", "pre_tokenizer")
        if whole is None or not self.controls:
            return False
        control = next(iter(self.controls))
        whole.add_tokens([self.flags.get(control, AddedToken(control, special=True, normalized=False))])
        return whole.encode(f"{control}a", add_special_tokens=False).ids[1:] == self.encode(["a"])[0]


def _is_words(content: str) -> bool:
    """Whether an added token is ordinary text (a word taught later, a run of spaces) rather than markup."""
    return all(character.isalnum() or character.isspace() or character in "_▁" for character in content)
