"""How long one waits: `entroprefill serve` beside a plain pipeline, over the same chunks, on this machine.

    python benchmarks/app_times.py --docs FOLDER                     # SmolLM2-135M, 5 questions, twice each
    python benchmarks/app_times.py --chunks 2000                     # over a store of 2,000 chunks, written for it

What is timed from outside, as a browser would: the page's first byte, the moment a question may be asked (documents
read and embedded, models loaded), the first piece of an answer and its end. The plain pipeline has no EntroPrefill in
it: the same chunks in the same prompt, transformers' own `generate` with its streamer, in a process of its own with the
model loaded. Both take turns, question by question; ratios are of the same question.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "smoke.jsonl"


def passages() -> list[dict[str, Any]]:
    """The labelled questions of the repository, with their chunks."""
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_store(folder: Path, chunks: int) -> None:
    """A folder of so many chunks: the passages of the questions, repeated under other names."""
    texts = [chunk for record in passages() for chunk in record["chunks"]]
    for number in range(chunks):
        chunk = texts[number % len(texts)]
        (folder / f"{number:05d}.txt").write_text(f"Part {number}. {chunk['text'][:700]}", encoding="utf-8")


def plain_first_token(model: Any, tokenizer: Any, prompt: list[int], most: int) -> tuple[float, float]:
    """Seconds to the first token and to the end of transformers' own generate."""
    import torch
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    ids = torch.tensor([prompt])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": most, "do_sample": False}
    begin, first = time.perf_counter(), None
    worker = threading.Thread(target=lambda: model.generate(**given, streamer=streamer))
    worker.start()
    for _ in streamer:
        first = first or time.perf_counter() - begin
    worker.join()
    return first or 0.0, time.perf_counter() - begin


class Server:
    """`entroprefill serve` in a process of its own."""

    def __init__(self, docs: Path, model: str, most: int, dtype: str) -> None:
        command = [sys.executable, "-c", "from entroprefill_rag.cli import main; main()", "serve"]
        command += ["--docs", str(docs), "--model", model]
        command += ["--port", "0", "--max-new-tokens", str(most), "--dtype", dtype, "--no-cache"]
        begin = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().strip()
        self._cookie = ""
        self._open("")
        self.first_screen = time.perf_counter() - begin
        while (state := json.loads(self._open("api/status").read()))["state"] == "loading":
            time.sleep(0.05)
        if state["state"] != "ready":
            raise SystemExit(f"the page could not load: {state['text']}")
        self.ready = time.perf_counter() - begin
        self.chunks = state["chunks"]

    def ask(self, question: str) -> tuple[float, float, dict[str, Any]]:
        """Seconds to the first piece of text and to the end, and the last event."""
        begin, first, event = time.perf_counter(), None, {"type": "none"}
        with self._open("api/ask", {"question": question}) as response:
            for line in response:
                event = json.loads(line)
                if event["type"] == "text" and first is None:
                    first = time.perf_counter() - begin
        if event["type"] != "done":
            raise SystemExit(f"no answer: {event}")
        return first or 0.0, time.perf_counter() - begin, event

    def record(self, event: dict[str, Any]) -> dict[str, Any]:
        """The audit record of an answer."""
        return json.loads(self._open(f"api/record/{event['id']}").read())

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(20)

    def _open(self, path: str, data: dict[str, Any] | None = None) -> Any:
        headers = {"X-EntroPrefill": "1", "Cookie": self._cookie}
        body = None if data is None else json.dumps(data).encode()
        response = urllib.request.urlopen(urllib.request.Request(f"{self._url}{path}", body, headers), timeout=600)
        if found := response.headers.get("set-cookie"):
            self._cookie = found.split(";")[0]
        return response


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        docs = given.docs
        if docs is None:
            docs = Path(folder)
            write_store(docs, given.chunks)
        measure(given, docs)


def measure(given: argparse.Namespace, docs: Path) -> None:
    """Start the page, load the plain model, take turns."""
    import torch

    from entroprefill_rag import LocalBackend, PruningConfig, RagRequest
    from entroprefill_rag.engine.sources import load, resolve_model
    from entroprefill_rag.retrieval import FolderIndex
    from entroprefill_rag.retrieval.index import request_chunks

    server = Server(docs, given.model, given.max_new_tokens, given.dtype)
    try:
        begin = time.perf_counter()
        loaded = load(resolve_model(given.model), device="cpu", dtype=getattr(torch, given.dtype))
        index = FolderIndex.open(docs, cache=False)
        index.search("warm")
        plain_ready = time.perf_counter() - begin
        # The prompt only: the backend that lays it out is closed before the model is run without it.
        questions = [record["question"] for record in passages()[: given.questions]]
        prompts = {}
        with LocalBackend(loaded.model, loaded.tokenizer) as backend:
            for question in questions:
                request = RagRequest(chunks=tuple(request_chunks(index.search(question, 20))), query=question)
                layout = backend.layout(request, PruningConfig(), max_new_tokens=given.max_new_tokens)
                prompts[question] = list(layout.input_ids)
        plain_first_token(loaded.model, loaded.tokenizer, prompts[questions[0]], 4)
        server.ask(questions[0])
        rows = []
        for turn in range(given.rounds):
            for question in questions:
                ours = plain = None
                for who in ("ours", "plain")[:: 1 if turn % 2 == 0 else -1]:
                    if who == "ours":
                        ours = server.ask(question)
                    else:
                        begin = time.perf_counter()
                        index.search(question, 20)
                        searched = time.perf_counter() - begin
                        first, whole = plain_first_token(
                            loaded.model, loaded.tokenizer, prompts[question], given.max_new_tokens
                        )
                        plain = (first + searched, whole + searched)
                rows.append((ours, plain))
    finally:
        server.close()
    report(given, server, plain_ready, rows)


def report(given: argparse.Namespace, server: Server, plain_ready: float, rows: list[Any]) -> None:
    """Print what was measured."""

    def spread(values: list[float], unit: str = " s") -> str:
        return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"

    pruned = sum(ours[2]["outcome"] == "pruned" for ours, _ in rows)
    tokens = statistics.median(ours[2]["prompt_tokens"] for ours, _ in rows)
    print(
        f"{given.model}, {given.dtype}, {server.chunks:,} chunks in the store, {len(rows)} answers ({pruned} pruned), "
        f"prompts of {tokens:,.0f} tokens (median); median and range.\n"
    )
    print("| | `entroprefill serve` | plain pipeline | plain / serve |")
    print("|---|---|---|---|")
    print(f"| first screen | {server.first_screen:.2f} s | – | – |")
    print(f"| ready, nothing kept from before | {server.ready:.1f} s | {plain_ready:.1f} s | – |")
    for name, place in (("first token", 0), ("whole answer", 1)):
        ours, plain = ([row[who][place] for row in rows] for who in (0, 1))
        ratios = [other / one for one, other in zip(ours, plain, strict=True)]
        print(f"| {name} | {spread(ours)} | {spread(plain)} | {spread(ratios, '')} |")


if __name__ == "__main__":
    main()
