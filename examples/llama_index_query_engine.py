"""Ask a folder through LlamaIndex: documents into an index on disk, the index reopened, one pass that prunes.

No key, no account; nothing leaves this machine. `entroprefill models install` gets the two packaged models.
"""

import argparse
import tempfile
from pathlib import Path

from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.schema import TextNode

from entroprefill_rag.documents import read_folder, split
from entroprefill_rag.integrations.llama_index import EntroPrefillPostprocessor, LocalEmbedding
from entroprefill_rag.report.plain import one_line, plain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", nargs="?", default="What is the notice period of the lease?")
parser.add_argument("--docs", type=Path, default=Path(__file__).parent / "documents", help="folder of documents")
parser.add_argument("--store", type=Path, help="where the index stays between calls; default: a temporary folder")
parser.add_argument("--model", help="hub id, folder or GGUF file; default: ENTROPREFILL_MODEL, else the packaged one")
parser.add_argument("--max-new-tokens", type=int, default=48)
args = parser.parse_args()

with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
    store = args.store or Path(temporary) / "index"
    embedder = LocalEmbedding()
    if not store.exists():
        chunks = [chunk for document in read_folder(args.docs).documents for chunk in split(document)]
        nodes = [TextNode(id_=chunk.id, text=chunk.text) for chunk in chunks]
        VectorStoreIndex(nodes, embed_model=embedder).storage_context.persist(str(store))
        print(f"Stored {len(nodes)} passages in {store}")
    index = load_index_from_storage(StorageContext.from_defaults(persist_dir=str(store)), embed_model=embedder)

    # The postprocessor prunes; the synthesizer it makes goes on from the same prefill.
    pp = EntroPrefillPostprocessor(model=args.model)
    synthesizer = pp.synthesizer(streaming=True, max_new_tokens=args.max_new_tokens, do_sample=False)
    engine = index.as_query_engine(node_postprocessors=[pp], response_synthesizer=synthesizer, similarity_top_k=6)
    response = engine.query(args.question)

    audit = response.metadata["entroprefill"]  # known before the first token
    print(f"Model: {audit['model']}. {audit['outcome'].capitalize()}: {audit['message']}\n")
    for piece in response.response_gen:
        print(plain(piece), end="", flush=True)  # without what a terminal would obey
    print("\n\nKept:   ", *(one_line(name) for name in audit["retained_ids"]))
    print("Dropped:", *(one_line(name) for name in audit["dropped_ids"]))
    for strength in ("exact", "probabilistic", "conditional"):
        if audit["claims"][strength]:
            print(f"\n{strength.capitalize()}: {plain(audit['claims'][strength])}")
