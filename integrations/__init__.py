"""Adapters to retrieval frameworks; installed as ``entroprefill_rag.integrations``."""

if __name__ != "entroprefill_rag.integrations":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which would make a second copy of every class; "
        "import entroprefill_rag.integrations instead (from a checkout: pip install -e .)"
    )
