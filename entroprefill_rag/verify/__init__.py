"""Checking a record: whether its numbers follow from each other, and whether a model gives them again."""

from entroprefill_rag.verify.check import check
from entroprefill_rag.verify.findings import Finding
from entroprefill_rag.verify.limits import LIMITS, Unknown
from entroprefill_rag.verify.replay import replay

__all__ = ["LIMITS", "Finding", "Unknown", "check", "replay"]
