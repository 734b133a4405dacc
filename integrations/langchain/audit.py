"""Where the record of a call is found: in a dict's output, a message's metadata, or beside retained documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.messages import BaseMessage
from pydantic import ValidationError

from entroprefill_rag.errors import RecordError
from entroprefill_rag.integrations.langchain.documents import PrunedDocuments
from entroprefill_rag.record import AuditRecord

IncludeRecord = Literal["summary", "full"]

SUMMARY = "entroprefill"
RECORD = "entroprefill_record"
HOW = "include_record='full' puts the full record beside this summary; get_audit(result) reads it"


def get_audit(result: Any) -> AuditRecord:
    """The full record of a call.

    Args:
        result: the output of an ``EntroPrefillRunnable`` or the message of a ``ChatEntroPrefill``, either made with
            ``include_record="full"``; or what an ``EntroPrefillCompressor`` returned.

    Raises:
        RecordError: ``result`` holds no full record; the message says how to get one.
    """
    if isinstance(result, PrunedDocuments):
        if result.audit is None:
            raise RecordError("there were no documents, so no model was run and there is no record")
        return result.audit
    holder = result.response_metadata if isinstance(result, BaseMessage) else result
    if not isinstance(holder, Mapping):
        raise RecordError(
            f"no record in {type(result).__name__}; pass the output of EntroPrefillRunnable, the message of "
            "ChatEntroPrefill, or the list that EntroPrefillCompressor.compress_documents returned"
        )
    if holder.get(RECORD) is None:
        raise RecordError(
            "this output holds a summary only; set include_record='full' where the runnable or chat model is made"
            if SUMMARY in holder
            else "this output holds no record; it does not come from EntroPrefill, or the key was dropped on the way"
        )
    try:
        return AuditRecord.model_validate(holder[RECORD])
    except ValidationError as error:
        raise RecordError(f"the record in this output was changed on the way: {error.errors()[0]['msg']}") from error
