"""A signature over a whole record: what a check of its numbers cannot know, somebody with the key vouches for.

HMAC-SHA-256 over the record's JSON in one fixed form, so that indentation does not matter. Whoever can check can also
sign: the key is shared, not public.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from entroprefill_rag.errors import RecordError
from entroprefill_rag.record import AuditRecord

LEAST_KEY = 16  # bytes
_PURPOSE = b"entroprefill/record/1\n"


def read_key(path: Path) -> bytes:
    """The key in a file: its bytes, less white space at both ends.

    Raises:
        RecordError: fewer than 16 bytes.
    """
    key = path.read_bytes().strip()
    if len(key) < LEAST_KEY:
        raise RecordError(
            f"the key in {str(path)!r} has {len(key)} bytes and needs at least {LEAST_KEY}; "
            "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def sign(record: AuditRecord, key: bytes) -> str:
    """The signature of a record, in hexadecimal."""
    return hmac.new(key, _PURPOSE + record.to_json().encode(), hashlib.sha256).hexdigest()


def signed(record: AuditRecord, signature: str, key: bytes) -> bool:
    """Whether a signature is that of this record under this key."""
    return hmac.compare_digest(sign(record, key).encode(), signature.strip().encode())


def signature_file(record: Path) -> Path:
    """Where the signature of a record's file stands."""
    return record.with_name(record.name + ".sig")
