"""Small tokenizers of every kind the layout has to cope with, made on the spot, and chat templates for them."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = [
    "The cat sat on the mat. A dog ran through the park and the cat ran after the dog.",
    "Document [1]: Title\nThe quick brown fox jumps over the lazy dog.\n\nQuestion: What does the fox do?\nAnswer:",
    "Answer the question using only the documents given. User: hello there\nAssistant: hello",
    "system user assistant model instruction end of text start of turn think tool call unused pad bos eos INST",
] * 4

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
DATED = CHATML.replace("You are a helpful assistant", "Today is ' + strftime_now('%d %B %Y') + '. You are helpful")
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# The system prompt stands in the last user turn, after the history.
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] + '\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.last else '') + message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA2 = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PARTS_ONLY = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
DROPS_SYSTEM = "{% for message in messages if message['role'] != 'system' %}{{ message['content'] }}\n{% endfor %}"
DROPS_USER = "{{ '<|im_start|>system\nhello<|im_end|>\n' }}"
REPEATS = "{% for message in messages %}{{ message['content'] + message['content'] }}{% endfor %}"
SHOUTS = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
REVERSED = "{% for message in messages | reverse %}{{ message['content'] }}\n{% endfor %}"


def _fast(tokenizer: Tokenizer, template: str | None, **names: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    wrapped.chat_template = template
    return wrapped


@cache
def _byte_level_model(missing: str, unknown: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    # As in SmolLM2: some bytes have no token. Ids are numbered anew without them.
    dead = {pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(mark)[0][0] for mark in missing}
    tokens = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1]) if token not in dead]
    vocab = {token: index for index, token in enumerate((["<|endoftext|>"] if unknown else []) + tokens)}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in state["merges"]]
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<|endoftext|>" if unknown else None))


def byte_level(
    template: str | None = CHATML, *, missing: str = "", unknown: bool = False, bos: bool = False
) -> PreTrainedTokenizerFast:
    """GPT-2, SmolLM2, Llama 3, Qwen: byte-level BPE. ``missing`` bytes have no token; ``unknown`` makes them unk."""
    tokenizer = Tokenizer.from_str(_byte_level_model(missing, unknown).to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>", "<tool_call>")])
    if bos:
        start = tokenizer.token_to_id("<bos>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", start)]
        )
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<bos>"}
    return _fast(tokenizer, template, **names, **({"unk_token": "<|endoftext|>"} if unknown else {}))


@cache
def _pieces() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Characters, words and merges of the corpus with the space written as U+2581."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    state = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in state["merges"]]
    # A newline goes through its byte, as in Llama 2.
    return tuple(token for token in tokens if "\n" not in token), tuple(m for m in merges if "\n" not in "".join(m))


def _sentencepiece_bpe(specials: list[str]) -> Tokenizer:
    tokens, merges = _pieces()
    vocab = {token: index for index, token in enumerate([*specials, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for token in tokens:
        vocab.setdefault(token, len(vocab))
    return Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def _begin(tokenizer: Tokenizer, name: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, tokenizer.token_to_id(name))]
    )


def llama_like(template: str | None = LLAMA2, *, scheme: str = "first") -> PreTrainedTokenizerFast:
    """Llama 2 and Mistral: BPE with byte fallback and a space before the text.

    ``scheme``: ``"first"`` and ``"always"`` by a pre-tokenizer (transformers 5), ``"normalizer"`` as in old files.
    """
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = _sentencepiece_bpe(specials)
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    _begin(tokenizer, "<s>")
    return _fast(tokenizer, template, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def gemma_like(template: str | None = GEMMA2) -> PreTrainedTokenizerFast:
    """Gemma: BPE with byte fallback, no space before the text, runs of spaces and newlines as added tokens."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = _sentencepiece_bpe(specials)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "▁▁", "<unused0>", "<table>")])
    _begin(tokenizer, "<bos>")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return _fast(tokenizer, template, **names)


def unigram(template: str | None = LLAMA2, *, byte_fallback: bool = True) -> PreTrainedTokenizerFast:
    """Unigram of the SentencePiece kind, where ``</s>`` and ``<0x41>`` are pieces that plain text can spell."""
    specials = ["<unk>", "<s>", "</s>"]
    tokens, _ = _pieces()
    vocab = [(name, 0.0) for name in specials]
    if byte_fallback:
        vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [(token, -float(3 + 20 / len(token))) for token in tokens if token not in specials]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    _begin(tokenizer, "<s>")
    return _fast(tokenizer, template, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def words(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: almost everything is unknown to it."""
    vocab = {"<unk>": 0, **{word: index for index, word in enumerate(["the", "cat", "sat", "?", "a", ":"], start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "isolated")
    tokenizer.add_special_tokens(["<unk>"])
    return _fast(tokenizer, template, unk_token="<unk>")


def slow(template: str | None = CHATML) -> PreTrainedTokenizerBase:
    """A tokenizer written in Python, on bytes."""
    tokenizer = ByT5Tokenizer(additional_special_tokens=["<|im_start|>", "<|im_end|>"], extra_ids=0)
    tokenizer.chat_template = template
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "byte-level, bytes dropped": lambda template=CHATML: byte_level(template, missing="\x04\x1d"),
    "byte-level, bytes unknown": lambda template=CHATML: byte_level(template, missing="\x04\x1d", unknown=True),
    "llama, first": llama_like,
    "llama, always": lambda template=LLAMA2: llama_like(template, scheme="always"),
    "llama, normalizer": lambda template=LLAMA2: llama_like(template, scheme="normalizer"),
    "gemma": gemma_like,
    "unigram": unigram,
    "unigram without bytes": lambda template=LLAMA2: unigram(template, byte_fallback=False),
    "slow": slow,
}
# What each kind's own tokens look like, written into texts to see that they stay text.
SPELLED = (
    "<|im_end|>",
    "<|im_start|>system",
    "</s>",
    "<s>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "<<SYS>>",
    "<|endoftext|>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<unused0>",
    "<table>",
)
