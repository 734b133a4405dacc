"""EntroPrefillCompressor: a filter in front of any other model."""

import copy

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough
from lc_cases import QUERY, SEEDED, STRICT, Fixed, Written, ids, make_documents

from entroprefill_rag.errors import RecordError, RequestError
from entroprefill_rag.integrations.langchain import EntroPrefillCompressor, PrunedDocuments, get_audit

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_f22_standalone_it_returns_retained_documents_in_order_with_their_record(compressor, documents):
    before = copy.deepcopy(documents)
    for kept in (
        compressor.compress_documents(documents, QUERY),
        await compressor.acompress_documents(documents, QUERY),
    ):
        record = get_audit(kept)
        assert ids(kept) == list(record.retained_ids)
        assert [each["id"] for each in kept.dropped] == list(record.dropped_ids)
        assert 0 < len(kept) < len(documents)
        assert all(document in documents for document in kept)
    assert documents == before


async def test_f22_works_in_a_contextual_compression_retriever_and_tells_the_run(compressor, documents):
    retrievers = pytest.importorskip("langchain_classic.retrievers")
    retriever = retrievers.ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=Fixed(found=documents)
    )
    expected = ids(compressor.compress_documents(documents, QUERY))
    written = Written()
    assert ids(retriever.invoke(QUERY, {"callbacks": [written]})) == expected
    assert ids(await retriever.ainvoke(QUERY, {"callbacks": [written]})) == expected
    assert [name for name, _ in written.custom] == ["entroprefill_audit"] * 2
    assert written.custom[0][1]["retained_ids"] == expected


async def test_f22_as_a_runnable_it_goes_into_a_chain(compressor, documents):
    chain = RunnablePassthrough.assign(context=compressor.as_runnable())
    given = {"input": QUERY, "context": documents}
    expected = ids(compressor.compress_documents(documents, QUERY))
    assert ids(chain.invoke(given)["context"]) == expected
    assert ids((await chain.ainvoke(given))["context"]) == expected
    alone = compressor.as_runnable()
    assert get_audit(alone.invoke({"question": QUERY, "documents": documents})).outcome == "pruned"
    written = Written()
    alone.invoke(given, {"callbacks": [written]})
    assert [name for name, _ in written.custom] == ["entroprefill_audit"]
    events = [event async for event in alone.astream_events(given, version="v2")]
    assert "on_custom_event" in [event["event"] for event in events]
    with pytest.raises(RequestError, match="no documents"):
        alone.invoke({"input": QUERY})
    with pytest.raises(RequestError, match="the input is a str"):
        alone.invoke(QUERY)


def test_f22_without_a_run_there_is_no_event_and_no_error(compressor, documents):
    written = Written()
    assert compressor.compress_documents(documents, QUERY, callbacks=[written])
    assert written.custom == []


def test_f17_its_record_says_that_another_model_is_outside_the_guarantees(compressor, documents):
    claims = get_audit(compressor.compress_documents(documents, QUERY)).claims
    assert "Another model that reads the retained chunks as a shortened prompt is outside" in claims.conditional


def test_f08_a_bypass_returns_every_document(backend, documents):
    strict = EntroPrefillCompressor(backend=backend, pruning=STRICT)
    kept = strict.compress_documents(documents, QUERY)
    assert kept == documents
    assert get_audit(kept).outcome == "bypassed"
    one = strict.compress_documents(documents[:1], QUERY)
    assert one == documents[:1]
    assert get_audit(one).reason.message


def test_f07_no_documents_need_no_model():
    kept = EntroPrefillCompressor(model="there/is-no-such-model").compress_documents([], QUERY)
    assert kept == PrunedDocuments()
    with pytest.raises(RecordError, match="there were no documents"):
        get_audit(kept)


@pytest.mark.parametrize("query", [None, "", "  ", 3])
def test_f07_a_question_that_is_none_is_refused(compressor, documents, query):
    with pytest.raises(RequestError, match="the question is"):
        compressor.compress_documents(documents, query)


def test_f21_relevance_scores_come_only_if_asked_for(backend, compressor, documents):
    assert all("relevance_score" not in each.metadata for each in compressor.compress_documents(documents, QUERY))
    scoring = EntroPrefillCompressor(backend=backend, pruning=SEEDED, add_relevance_score=True)
    for document in scoring.compress_documents(documents, QUERY):
        assert type(document.metadata["relevance_score"]) is float
        assert document.metadata["page"] == int(document.id[1:])
    assert all(each.metadata.keys() == {"page"} for each in documents)


def test_f19_documents_that_did_not_fit_go_on_to_the_other_model(backend):
    many = make_documents(30, words=20)
    drop = SEEDED.model_copy(update={"overflow": "drop_last"})
    kept = EntroPrefillCompressor(backend=backend, pruning=drop).compress_documents(many, QUERY)
    out = get_audit(kept).prompt.not_admitted
    assert out
    assert set(out) <= set(ids(kept))
    assert ids(kept) == [each for each in ids(many) if each in ids(kept)]


def test_f21_missing_ids_stay_missing(compressor):
    documents = [Document(page_content=f"text {i} " * 4) for i in range(4)]
    kept = compressor.compress_documents(documents, QUERY)
    assert all(document.id is None for document in kept)
    assert all(each["id"].startswith("text-") for each in kept.dropped)
