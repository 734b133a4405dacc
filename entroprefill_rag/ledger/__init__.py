"""Which draws have been seen: what keeps an audit from being retried, or its draws reused, until it passes."""

from entroprefill_rag.ledger.reuse import Grant, Refused, ReuseLedger

__all__ = ["Grant", "Refused", "ReuseLedger"]
