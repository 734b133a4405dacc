"""Adapters to retrieval frameworks; installed as ``entroprefill_rag.integrations``."""
