"""An embedder without weights, documents that are told apart by it, and the command line with it in place."""

import sys
from pathlib import Path

import numpy as np

DOCUMENTS = {
    "jazz.md": "# Jazz\n\nJazz quiz: jazz jazz jazz, quizzes about jazz.",
    "bees.md": "# Bees\n\nBees need trees. Bees see bees between trees.",
    "hum.txt": "Hum, drum, mum: a humming drummer drums a mammoth drum.",
    "loop.txt": "Loops of wool roll low on a pool of yellow oil.",
    "\x1b[31mred.txt": "\x1b]0;owned\x07Car parts \x1b[2J are far apart at a bazaar \x9b1m afar.",
}
# Run with `python -c`: the command itself, but for the weights of an embedder.
COMMAND = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import letters; letters.main()",
]


class LetterEmbedder:
    """Counts letters: a real if crude embedding."""

    name = "letters"
    fingerprint = "letters-chat"

    def __init__(self, name=None, *, device=None):
        pass

    def _vector(self, text):
        counts = np.array([1e-3 + text.lower().count(chr(97 + letter)) for letter in range(26)], dtype=np.float32)
        return counts / np.linalg.norm(counts)

    def documents(self, texts, progress=None):
        return np.stack([self._vector(text) for text in texts])

    def query(self, text):
        return self._vector(text)


def write_documents(folder):
    folder.mkdir()
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text)
    (folder / "photo.png").write_bytes(b"\x89PNG")
    return folder


def main():
    import entroprefill_rag.retrieval
    from entroprefill_rag.cli import main

    entroprefill_rag.retrieval.SentenceEmbedder = LetterEmbedder
    main()
