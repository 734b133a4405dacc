"""Ask a folder through an LCEL chain: documents into a Chroma store on disk, the store reopened, one pass that prunes.

No key, no account; nothing leaves this machine. `entroprefill models install` gets the two packaged models.
"""

import argparse
import tempfile
from pathlib import Path

from chromadb.config import Settings
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough

from entroprefill_rag.documents import read_folder, split
from entroprefill_rag.integrations.langchain import EntroPrefillRunnable, LocalEmbeddings
from entroprefill_rag.report.plain import one_line, plain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", nargs="?", default="What is the notice period of the lease?")
parser.add_argument("--docs", type=Path, default=Path(__file__).parent / "documents", help="folder of documents")
parser.add_argument("--store", type=Path, help="where the store stays between calls; default: a temporary folder")
parser.add_argument("--model", help="hub id, folder or GGUF file; default: ENTROPREFILL_MODEL, else the packaged one")
parser.add_argument("--max-new-tokens", type=int, default=48)
args = parser.parse_args()

with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
    folder = args.store or Path(temporary) / "chroma"
    new = not folder.exists()
    # An embedder is always named: Chroma's default one would be fetched.
    offline = Settings(anonymized_telemetry=False)
    store = Chroma("passages", LocalEmbeddings(), persist_directory=str(folder), client_settings=offline)
    if new:
        chunks = [chunk for document in read_folder(args.docs).documents for chunk in split(document)]
        titled = [Document(id=chunk.id, page_content=chunk.text, metadata={"title": chunk.title}) for chunk in chunks]
        store.add_documents(titled)
        print(f"Stored {len(titled)} passages in {folder}")
        store = Chroma("passages", LocalEmbeddings(), persist_directory=str(folder), client_settings=offline)

    answer = EntroPrefillRunnable(model=args.model, max_tokens=args.max_new_tokens, temperature=0, title_key="title")
    chain = {"context": store.as_retriever(search_kwargs={"k": 6}), "input": RunnablePassthrough()} | answer
    audit = None
    for piece in chain.stream(args.question):
        if "entroprefill" in piece:  # known before the first token
            audit = piece["entroprefill"]
            print(f"Model: {audit['model']}. {audit['outcome'].capitalize()}: {audit['message']}\n")
        print(plain(piece.get("answer", "")), end="", flush=True)  # without what a terminal would obey
    print("\n\nKept:   ", *(one_line(name) for name in audit["retained_ids"]))
    print("Dropped:", *(one_line(name) for name in audit["dropped_ids"]))
    for strength in ("exact", "probabilistic", "conditional"):
        if audit["claims"][strength]:
            print(f"\n{strength.capitalize()}: {plain(audit['claims'][strength])}")
