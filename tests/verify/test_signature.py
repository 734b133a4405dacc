"""A signature covers every place of a record, those too that no number depends on."""

from __future__ import annotations

import json

import pytest
import tampering
from real_records import record_of

from entroprefill_rag.errors import RecordError
from entroprefill_rag.record import AuditRecord
from entroprefill_rag.verify.signature import read_key, sign, signed

KEY = b"0123456789abcdef"


def test_no_place_of_a_signed_record_can_be_changed():
    record = record_of("pruned")
    signature = sign(record, KEY)
    assert signed(AuditRecord.from_json(record.to_json(indent=3)), signature, KEY)
    tried = 0
    for path, how, data in tampering.tampered(record.to_dict()):
        try:
            changed = AuditRecord.from_json(json.dumps(data))
        except RecordError:
            continue
        if changed != record:
            tried += 1
            assert not signed(changed, signature, KEY), (path, how)
    assert tried > 500


def test_another_key_does_not_vouch():
    record = record_of("off")
    assert not signed(record, sign(record, KEY), KEY + b"0")
    assert not signed(record, "ünknown", KEY)


def test_a_key_that_can_be_guessed_is_refused(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"short\n")
    with pytest.raises(RecordError, match="at least 16"):
        read_key(file)
    file.write_bytes(KEY + b"\n")
    assert read_key(file) == KEY
