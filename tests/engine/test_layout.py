"""A laid-out prompt: where everything is, what is protected, and that decoding gives it back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CHATML, GEMMA2, KINDS, SPELLED, byte_level, gemma_like, llama_like, unigram

from entroprefill_rag.engine.layout import PromptStyle, SegmentTokenizer, build_layout
from entroprefill_rag.errors import PromptOverflowError, TemplateError
from entroprefill_rag.request import Chunk, RagRequest

SEGMENTS = {name: SegmentTokenizer(make()) for name, make in KINDS.items()}
PLAIN = {name: SegmentTokenizer(make(None)) for name, make in KINDS.items()}
kinds = pytest.mark.parametrize("kind", list(KINDS))
# Tokenizers whose decoding gives back exactly what went in, with a template that writes the first token.
EXACT = ("byte-level", "byte-level, bytes dropped", "byte-level, bytes unknown", "gemma", "llama, first")
TEXTS = ("The cat sat.", "A dog ran.\nIt ran far.", "Nothing here.")


def request(*texts, query="Who sat?", **fields):
    chunks = tuple(Chunk(id=f"c{index}", text=text) for index, text in enumerate(texts))
    return RagRequest(chunks=chunks, query=query, **fields)


def lay(request, tokenizer, **options):
    return build_layout(request, tokenizer, **{"sink_tokens": 4, "max_positions": None, **options})


def text_of(segments, layout, span):
    return segments.decode(layout.input_ids[slice(*span)])


def check(layout):
    """What holds for every layout."""
    assert len(layout.protected) == layout.n_tokens
    assert layout.suffix_span[1] == layout.n_tokens
    edges = [0, *(edge for span in layout.chunk_spans for edge in span), *layout.suffix_span]
    assert edges == sorted(edges)
    inside = [False] * layout.n_tokens
    for (start, end), removable in zip(layout.chunk_spans, layout.removable, strict=True):
        inside[start:end] = [removable] * (end - start)
    assert layout.protected == tuple(not free for free in inside)
    assert all(layout.protected[: layout.sink_tokens])
    assert len(layout.chunk_ids) == len(layout.chunk_spans) == len(layout.protected_reasons)


@kinds
def test_header_text_and_only_they_are_the_chunk(kind):
    segments = SEGMENTS[kind]
    layout = lay(request(*TEXTS), segments)
    check(layout)
    shown = [segments.clean([f"Document [{n}]\n{text}"])[0].text for n, text in enumerate(TEXTS, start=1)]
    assert [text_of(segments, layout, span) for span in layout.chunk_spans] == shown
    delimiters = [(a[1], b[0]) for a, b in zip(layout.chunk_spans, layout.chunk_spans[1:], strict=False)]
    # A delimiter of spaces alone, where a tokenizer has no newline, loses one when decoded without what is before it.
    gap = segments.clean(["\n\n"])[0].text
    assert all(text_of(segments, layout, span) in (gap, gap.removeprefix(" ")) for span in delimiters)
    assert "Who sat?" in segments.decode(layout.input_ids[layout.suffix_span[0] :]).replace("▁", " ")
    assert layout.protected_reasons == (None, None, None)


@kinds
def test_special_tokens_spelled_anywhere_in_a_request_stay_text(kind):
    evil = " ".join(SPELLED) + " <0x41>"
    chunks = tuple(Chunk(id=f"c{index}", text=evil + text, title=evil) for index, text in enumerate(TEXTS))
    bad = RagRequest(instruction=evil, chunks=chunks, query=evil, history=[("user", evil), ("assistant", evil)])
    good = RagRequest(
        instruction="x", chunks=[Chunk(id="c", text="x")], query="x", history=[("user", "x"), ("assistant", "x")]
    )
    for segments in (SEGMENTS[kind], PLAIN[kind]):
        ours = [token for token in lay(bad, segments).input_ids if token in segments.forbidden]
        # The template's own, in its order, and no more.
        assert ours == [token for token in lay(good, segments).input_ids if token in segments.forbidden]


@kinds
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_decoding_gives_the_prompt_back(kind, data):
    piece = st.one_of(st.text(alphabet=st.characters(), max_size=20), st.sampled_from([*SPELLED, " ", "\n\n"]))
    text = st.lists(piece, max_size=3).map("".join)
    chunks = data.draw(st.lists(st.builds(dict, text=text, title=text), max_size=3))
    asked = RagRequest(
        instruction=data.draw(text),
        chunks=[Chunk(id=f"c{index}", **fields) for index, fields in enumerate(chunks)],
        query=data.draw(text) + "?",
        history=data.draw(st.sampled_from([(), (("user", "a b"), ("assistant", " c"))])),
    )
    for segments in (SEGMENTS[kind], PLAIN[kind]):
        layout = lay(asked, segments)
        check(layout)
        decoded = segments.decode(layout.input_ids)
        if kind in EXACT and segments is SEGMENTS[kind]:
            assert decoded.replace("▁", " ") == layout.rendered.replace("▁", " ")
        assert "".join(decoded.replace("▁", " ").split()) == "".join(layout.rendered.replace("▁", " ").split())
        if decoded != layout.rendered:
            assert any("decodes this prompt differently" in note for note in layout.notes)
        layout.rendered.encode()


@pytest.mark.parametrize("kind", EXACT)
def test_nothing_is_noted_where_nothing_was_changed(kind):
    assert lay(request(*TEXTS), SEGMENTS[kind]).notes == ()


def test_what_was_replaced_is_noted_by_place_and_code_point_without_quoting():
    asked = RagRequest(
        chunks=[Chunk(id="a", text="se\x04cret"), Chunk(id="b", text="x\ud800y"), Chunk(id="c", text="\x04")],
        query="q?",
    )
    layout = lay(asked, SEGMENTS["byte-level, bytes dropped"])
    assert layout.notes == (
        "1 lone surrogate(s), which are not characters, replaced by U+FFFD in chunk 'b'",
        "2 character(s) that the tokenizer cannot encode (U+0004) replaced by U+FFFD (white space by a space) in "
        "chunk 'a', chunk 'c'",
    )
    assert "x\ufffdy" in layout.rendered
    assert not any("cret" in note for note in layout.notes)


def test_spaces_that_a_tokenizer_shows_after_its_tokens_are_noted():
    layout = lay(request(*TEXTS), SEGMENTS["llama, always"])
    assert layout.notes == ("the tokenizer decodes this prompt differently from character 3 on, in spaces only",)
    # Only there: no chunk and no delimiter got one.
    decoded = SEGMENTS["llama, always"].decode(layout.input_ids)
    assert decoded.replace("<s> ", "<s>") == layout.rendered


@kinds
@pytest.mark.parametrize("segments", [SEGMENTS, PLAIN])
@pytest.mark.parametrize("query", ["Who sat?", "Where did the dog run, and\nwho sat?", "x"])
def test_it_is_known_where_the_query_is(kind, segments, query):
    tokenizer = segments[kind]
    layout = lay(request(*TEXTS, query=query), tokenizer)
    start, end = layout.query_span
    assert layout.suffix_span[0] < start < end <= layout.n_tokens, "words before it"
    wanted = tokenizer.clean([query])[0].text
    found, whole = text_of(tokenizer, layout, (start, end)), text_of(tokenizer, layout, layout.suffix_span)
    # A token may hold the query's last character and what follows it: it is then left out, and so is the character.
    assert found.strip() in (wanted, wanted[:-1])
    assert found in whole


def test_a_query_alone_after_the_documents_is_all_of_the_suffix():
    style = PromptStyle(chat=False, template="{context}{query}")
    layout = lay(request(*TEXTS), PLAIN["byte-level"], style=style)
    assert layout.query_span == layout.suffix_span


@pytest.mark.parametrize("make", [llama_like, gemma_like])
def test_the_templates_first_token_is_not_doubled(make):
    tokenizer = make()
    layout = lay(request(*TEXTS), tokenizer)
    assert layout.input_ids[0] == tokenizer.bos_token_id
    assert layout.input_ids.count(tokenizer.bos_token_id) == 1


def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_text():
    for make in (llama_like, gemma_like, unigram):
        tokenizer = make(None)
        layout = lay(request("The cat sat."), tokenizer)
        head = tokenizer.encode("Answer the question using only")
        assert list(layout.input_ids[: len(head) - 1]) == head[:-1]
        assert layout.rendered.startswith(f"{tokenizer.bos_token}Answer")
    assert lay(request("x"), byte_level(None)).rendered.startswith("Answer")


def test_a_first_token_written_in_a_plain_template_is_not_doubled():
    layout = lay(request("x"), gemma_like(None), style=PromptStyle(template="<bos>{context}\n{query}"))
    assert layout.rendered == "<bos>Document [1]\nx\nWho sat?"
    assert layout.input_ids.count(gemma_like().bos_token_id) == 1


def test_plain_templates_may_write_special_tokens_and_texts_may_not():
    tokenizer = byte_level(None)
    style = PromptStyle(template="<|im_start|>{context}<|im_end|>{query}", chunk_header="", untitled_header="")
    layout = lay(request("<|im_end|>", query="<|im_end|>?"), tokenizer, style=style, sink_tokens=0)
    assert layout.input_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert layout.rendered == "<|im_start|><|im_end|><|im_end|><|im_end|>?"


@pytest.mark.parametrize("make", [byte_level, gemma_like, llama_like])
def test_between_its_boundaries_a_prompt_has_the_tokens_of_the_whole_text(make):
    tokenizer = make()
    style = PromptStyle(separator="", chunk_header="", untitled_header="")
    layout = lay(RagRequest(instruction="Use the docs.", query="Who sat?", chunks=[]), tokenizer, style=style)
    whole = tokenizer.encode(layout.rendered, add_special_tokens=False)
    start = layout.suffix_span[0]
    assert list(layout.input_ids[:start]) == whole[:start]


@kinds
def test_sinks_protect_a_chunk_they_reach_into(kind):
    style = PromptStyle(template="{context}\n{query}", separator="")
    for sink_tokens in (0, 1, 3, 64):
        layout = lay(request(*TEXTS), PLAIN[kind], style=style, sink_tokens=sink_tokens)
        check(layout)
        starts = [start for start, _ in layout.chunk_spans]
        assert layout.protected_reasons == tuple("sinks" if start < sink_tokens else None for start in starts)


def test_the_callers_protection_comes_first_and_empty_chunks_are_protected():
    chunks = [
        Chunk(id="kept", text="The cat sat.", protected=True),
        Chunk(id="blank", text=" \n"),
        Chunk(id="empty", text=""),
        Chunk(id="titled", text="", title="A title"),
        Chunk(id="free", text="A dog."),
        Chunk(id="both", text="", protected=True),
    ]
    segments = SEGMENTS["byte-level"]
    layout = lay(RagRequest(chunks=chunks, query="Who?"), segments)
    check(layout)
    assert layout.protected_reasons == ("caller", "empty", "empty", None, None, "caller")
    assert layout.chunk_tokens[1] == layout.chunk_tokens[2] == layout.chunk_tokens[5] == 0
    # No delimiter stands beside a chunk that is not there.
    assert "Document [1]\nThe cat sat.\n\nDocument [4]: A title\n\n\nDocument [5]\nA dog.\n\nQuestion: Who?" in (
        layout.rendered
    )
    assert segments.decode(layout.input_ids) == layout.rendered


def test_an_empty_first_chunk_leaves_no_delimiter():
    layout = lay(request("", "The cat."), byte_level(None), style=PromptStyle(template="{context}|{query}"))
    assert layout.rendered == "Document [2]\nThe cat.|Who sat?"
    assert (
        lay(request("", ""), byte_level(None), style=PromptStyle(template="{context}|{query}")).rendered == "|Who sat?"
    )


@kinds
def test_a_request_without_chunks_has_a_layout(kind):
    for segments in (SEGMENTS[kind], PLAIN[kind]):
        layout = lay(request(), segments)
        check(layout)
        assert layout.chunk_ids == layout.chunk_spans == layout.protected_reasons == ()
        assert all(layout.protected)
        assert "Who sat?" in segments.decode(layout.input_ids[layout.suffix_span[0] :]).replace("▁", " ")


def test_five_hundred_chunks_are_laid_out():
    layout = lay(request(*(f"Text number {index}." for index in range(500))), SEGMENTS["llama, first"])
    check(layout)
    assert len(layout.chunk_ids) == 500
    assert "Document [500]" in layout.rendered


def test_a_prompt_over_the_models_positions_is_refused_by_default():
    with pytest.raises(PromptOverflowError, match=r"overflow='drop_last'"):
        lay(request(*TEXTS), SEGMENTS["byte-level"], max_positions=50)


def test_the_last_chunks_are_not_admitted_when_asked_and_the_rest_is_as_without_them():
    segments = SEGMENTS["byte-level"]
    fits = lay(request(*TEXTS[:2]), segments)
    layout = lay(request(*TEXTS), segments, max_positions=fits.n_tokens + 10, reserve=10, overflow="drop_last")
    check(layout)
    assert layout.not_admitted == ("c2",)
    assert layout.chunk_ids == ("c0", "c1")
    assert layout.input_ids == fits.input_ids
    assert layout.rendered == fits.rendered


def test_a_chunk_longer_than_the_window_is_not_admitted():
    layout = lay(
        request("The cat sat. " * 200, "A dog."), SEGMENTS["byte-level"], max_positions=300, overflow="drop_last"
    )
    assert layout.not_admitted == ("c0",)
    assert "Document [2]\nA dog." in layout.rendered
    only = lay(request("The cat sat. " * 200), SEGMENTS["byte-level"], max_positions=300, overflow="drop_last")
    assert only.not_admitted == ("c0",)
    assert only.chunk_ids == ()


def test_a_template_with_the_query_first_is_refused():
    with pytest.raises(TemplateError, match="all documents must precede the query"):
        lay(request(*TEXTS), SEGMENTS["byte-level"], style=PromptStyle(template="{query}{context}"))


def test_a_tokenizer_and_its_segment_tokenizer_give_the_same_layout_and_the_tokenizer_stays_as_it_was():
    tokenizer = byte_level()
    state = tokenizer.backend_tokenizer.to_str()
    assert lay(request(*TEXTS), tokenizer) == lay(request(*TEXTS), SegmentTokenizer(tokenizer))
    assert tokenizer.backend_tokenizer.to_str() == state
    assert tokenizer.chat_template == CHATML


def test_threads_get_what_one_thread_gets():
    tokenizer = gemma_like(GEMMA2)
    requests = [request(*(f"{text} {'</s> é日' * index}" for text in TEXTS)) for index in range(24)]
    alone = [lay(each, gemma_like(GEMMA2)) for each in requests]
    done = threading.Event()

    def disturb():
        while not done.is_set():
            tokenizer("a b c", truncation=True, max_length=1, padding="max_length")

    with ThreadPoolExecutor(4) as pool:
        disturbance = pool.submit(disturb)
        try:
            assert list(pool.map(lambda each: lay(each, tokenizer), requests)) == alone
        finally:
            done.set()
        disturbance.result()


def test_every_messy_file_can_be_a_chunk(data_dir):
    files = sorted(path for path in (data_dir / "messy").glob("*") if path.is_file())
    if not files:
        pytest.skip("no messy files")
    chunks = []
    for path in files:
        raw = path.read_bytes()[:40_000]
        chunks.append(Chunk(id=path.name, text=raw.decode("utf-8", "surrogateescape"), title=path.name))
    asked = RagRequest(chunks=chunks, query="What is wrong here?")
    for kind in ("byte-level, bytes unknown", "llama, first", "unigram"):
        segments = SEGMENTS[kind]
        layout = lay(asked, segments)
        check(layout)
        assert layout.chunk_ids == tuple(path.name for path in files)
        for span in layout.chunk_spans:
            assert segments.forbidden.isdisjoint(layout.input_ids[slice(*span)])
        if kind in EXACT:
            assert segments.decode(layout.input_ids).replace("▁", " ") == layout.rendered.replace("▁", " ")


@pytest.mark.model
def test_smollm2_gets_exactly_its_prompt(smollm2_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    segments = SegmentTokenizer(tokenizer)
    evil = " ".join(SPELLED)
    chunks = [
        Chunk(id=f"c{index}", text=f"{text} {evil} é日😀 \x04\x1d", title=evil) for index, text in enumerate(TEXTS)
    ]
    asked = RagRequest(instruction=evil, chunks=chunks, query=evil, history=[("user", evil), ("assistant", evil)])
    layout = lay(asked, segments, max_positions=8192)
    check(layout)
    assert segments.decode(layout.input_ids) == layout.rendered
    controls = [token for token in layout.input_ids if token in segments.forbidden]
    # Four turns that begin and end, and the one that the answer goes into.
    assert tokenizer.convert_ids_to_tokens(controls) == ["<|im_start|>", "<|im_end|>"] * 4 + ["<|im_start|>"]
    assert "U+0004, U+001D" in layout.notes[0]
    simple = lay(request(*TEXTS, instruction="Use the documents."), segments)
    assert simple.notes == ()
    start, end = simple.chunk_spans[0][0], simple.suffix_span[0]
    whole = tokenizer.encode(simple.rendered, add_special_tokens=False)
    assert list(simple.input_ids[:start]) == whole[:start]
    assert list(simple.input_ids[end:]) == whole[len(whole) - (simple.n_tokens - end) :]
