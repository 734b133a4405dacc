"""Documents from a folder: read safely, then split into chunks with stable ids.

The readers of other formats are optional: a file whose reader is not installed is skipped, with the reason.
"""

from entroprefill_rag.documents.folder import Document, Reading, Skipped, TextCache, read_folder
from entroprefill_rag.documents.readers import Limits
from entroprefill_rag.documents.splitting import split

__all__ = ["Document", "Limits", "Reading", "Skipped", "TextCache", "read_folder", "split"]
