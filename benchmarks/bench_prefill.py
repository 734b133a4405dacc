"""Prefill with and without pruning, in one process, alternating: ratios with their spread.

    python benchmarks/bench_prefill.py                      # SmolLM2-135M, 1k to 8k tokens
    python benchmarks/bench_prefill.py --model NAME --tokens 2048,4096 --rounds 7 --json out.json

Prompts are real passages (benchmarks/data/smoke.jsonl) filled up to the length wanted. What is compared in each round:

- plain: transformers' own `generate` for one token, on a model without our hooks;
- off: the backend with pruning switched off (its tokenization left out);
- pruned: chunks forced out at a layer, so that the kept share is what the column says;
- ideal: plain time times the share of operations left, as `entroprefill plan` predicts it;
- rule: reading, proposing and auditing at 8 layers, none accepted, as a share of the plain prefill.

A second table has what `entroprefill plan` predicts beside what was measured: speed-up, KV cache, cost of looking.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import StoppingCriteria

from entroprefill_rag import AuditConfig, Chunk, LocalBackend, PruningConfig, RagRequest
from entroprefill_rag.engine import families
from entroprefill_rag.engine.decoding import DecodeWatch, StopOnDrift
from entroprefill_rag.engine.install import Installation
from entroprefill_rag.engine.run import PrefillRun
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.rule.cost import scoring_flops
from entroprefill_rag.rule.masses import chunk_membership
from entroprefill_rag.rule.monitor import Monitor
from entroprefill_rag.rule.plan import plan_prefill

DATA = Path(__file__).parent / "data" / "smoke.jsonl"
OFF = PruningConfig(enabled=False)


def passages() -> list[dict[str, str]]:
    """All passages of the smoke questions, in order."""
    records = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return [chunk for record in records for chunk in record["chunks"]]


def prompt_of(backend: LocalBackend, tokens: int) -> tuple[RagRequest, PromptLayout]:
    """A request of about ``tokens`` tokens in 20 chunks of real text."""
    text = "\n".join(part["text"] for part in passages())
    ids = backend.tokenizer(text, add_special_tokens=False)["input_ids"]
    while len(ids) < tokens:
        ids = ids * 2
    size = (tokens - 80) // 20 - 8
    chunks = [
        Chunk(id=f"c{i}", text=backend.tokenizer.decode(ids[i * size : (i + 1) * size]), title=f"Part {i + 1}")
        for i in range(20)
    ]
    question = "Which of the parts above says who was younger, and when was he or she born, according to the text?"
    request = RagRequest(chunks=chunks, query=question)
    return request, backend.layout(request)


class Forced:
    """Accepts at one layer, keeping the given share of the chunks, spread over the prompt."""

    def __init__(self, layout: PromptLayout, layer: int, keep: float) -> None:
        self.layers = (layer,)
        k = len(layout.chunk_spans)
        stay = {round(i / keep) for i in range(round(k * keep))}
        kept = torch.ones(layout.n_tokens, dtype=torch.bool)
        for index, (start, end) in enumerate(layout.chunk_spans):
            if index not in stay:
                kept[start:end] = False
        self.kept = kept.nonzero().flatten()

    def observe(self, layer: int, read: Any) -> Any:
        return SimpleNamespace(accepted=True, kept_tokens=self.kept, removed=())


class NeverAccepts:
    """The real monitor, whose proposals and audits run at every layer and are then turned down."""

    def __init__(self, config: PruningConfig, layout: PromptLayout, backend: LocalBackend, layers: tuple[int, ...]):
        anatomy = backend.anatomy
        self.layers, self._layout, self._config = layers, layout, config
        self._heads = (anatomy.query_heads, anatomy.kv_heads)
        self.audited, self.rows = 0, 0

    def observe(self, layer: int, read: Any) -> Any:
        monitor = Monitor(self._config, self._layout, self.layers, *self._heads, seed=layer)
        monitor.observe(layer, read)
        self.audited += bool(monitor.trials[-1].audits)
        setup = monitor.setup()
        looked = [row for one in setup.observers for row in one.rows] if setup else []
        self.rows = len({*looked, *monitor.proposal_rows.tolist()})
        return SimpleNamespace(accepted=False, kept_tokens=None, removed=())


def first_token(model: Any, ids: torch.Tensor) -> None:
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)


def forced_prefill(
    model: Any, installation: Installation, layout: PromptLayout, monitor: Any, ids: torch.Tensor
) -> Any:
    membership = chunk_membership(layout.chunk_spans, layout.n_tokens, first=layout.sink_tokens)
    run = PrefillRun(installation.anatomy, layout.n_tokens, monitor, membership)
    with installation.activate(run):
        first_token(model, ids)
    return run


def cache_bytes(model: Any, installation: Installation, layout: PromptLayout, forced: Forced, ids: torch.Tensor) -> int:
    """Bytes of the KV cache after a pruned prefill, as the model holds it."""
    run = PrefillRun(
        installation.anatomy, layout.n_tokens, forced, chunk_membership(layout.chunk_spans, layout.n_tokens)
    )
    with installation.activate(run):
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    value = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, value


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "low": ordered[0], "high": ordered[-1]}


def measure(backend: LocalBackend, tokens: int, layers: list[int], keeps: list[float], rounds: int, tick: Any) -> Any:
    """All comparisons at one prompt length."""
    model = backend.model
    request, layout = prompt_of(backend, tokens)
    ids = torch.tensor([layout.input_ids], device=model.device)
    shape = families.shape_of(model, backend.anatomy)
    cases = [(layer, keep) for layer in layers for keep in keeps]
    times: dict[Any, list[float]] = {"plain": [], "off": [], "rule": [], **{case: [] for case in cases}}
    monitored = families.default_layers(
        backend.anatomy, families.monitorable(backend.anatomy, (layout.chunk_spans[0][0], layout.n_tokens), tokens)
    )
    # Caps and audit so wide that a proposal reaches its audit wherever it can: the rule's dearest path.
    wide = PruningConfig(eps_row=0.9, mass_min=0.0, min_saving=0.05, audit=AuditConfig(eps_audit=0.2))
    audited, looked, stored = 0, 0, {}
    backend.close()
    for _ in range(rounds + 1):
        seconds = {"plain": timed(lambda: first_token(model, ids))[0]}
        with LocalBackend(model, backend.tokenizer) as fresh:
            fresh.model_info  # noqa: B018  (hashed once per backend, not per call)
            taken, result = timed(lambda: fresh.generate(request, OFF, max_new_tokens=1, do_sample=False))
            seconds["off"] = taken - result.timings.layout
        installation = Installation(model)
        for layer, keep in cases:
            forced = Forced(layout, layer, keep)
            seconds[layer, keep] = timed(lambda: forced_prefill(model, installation, layout, forced, ids))[0]  # noqa: B023
        watcher = NeverAccepts(wide, layout, backend, monitored)
        run = forced_prefill(model, installation, layout, watcher, ids)
        seconds["rule"], audited, looked = run.stamps.rule, watcher.audited, watcher.rows
        if not stored:
            for case in cases:
                stored[case] = cache_bytes(model, installation, layout, Forced(layout, *case), ids)
        installation.close()
        for name, value in seconds.items():
            times[name].append(value)
        tick()
    times = {name: values[1:] for name, values in times.items()}  # the first round warms up
    plain = times["plain"]
    rows = []
    for layer, keep in cases:
        forced = Forced(layout, layer, keep)
        # Nothing is looked at where the set is forced.
        plan = plan_prefill(shape, tokens=layout.n_tokens, layer=layer, kept=forced.kept.numpy(), monitored=0)
        share = 1 / plan.speedup
        pairs = list(zip(plain, times[layer, keep], strict=True))
        rows.append(
            {
                "layer": layer,
                "kept_share": keep,
                "speedup": spread([a / b for a, b in pairs]),
                "ideal_speedup": plan.speedup,
                "over_ideal": spread([b / (a * share) for a, b in pairs]),
                "predicted_kv_bytes": plan.kv_bytes[1],
                "kv_bytes": stored[layer, keep],
            }
        )
    looking = scoring_flops(shape, monitored=len(monitored), rows=looked, tokens=layout.n_tokens)
    return {
        "tokens": layout.n_tokens,
        "rows_looked_at": looked,
        "predicted_rule_share": looking / plan.full_flops,
        "plain_seconds": spread(plain),
        "off_over_plain": spread([b / a for a, b in zip(plain, times["off"], strict=True)]),
        "rule_share": spread([b / a for a, b in zip(plain, times["rule"], strict=True)]),
        "monitored": list(monitored),
        "audited_layers": audited,
        "pruned": rows,
    }


def fixed_cost(backend: LocalBackend, rounds: int) -> dict[str, float]:
    """Milliseconds that a call of the backend, pruning off, adds to plain `generate` at a short prompt: quartiles."""
    model = backend.model
    chunks = [Chunk(id="a", text="The lease ends in May."), Chunk(id="b", text="Tea is at four.")]
    request = RagRequest(chunks=chunks, query="When does the lease end?")
    extra = []
    for _ in range(rounds + 3):
        with LocalBackend(model, backend.tokenizer) as fresh:
            ids = torch.tensor([fresh.layout(request).input_ids], device=model.device)
            fresh.model_info  # noqa: B018  (hashed once per backend, not per call)
            taken, result = timed(lambda: fresh.generate(request, OFF, max_new_tokens=1, do_sample=False))
        plain, _ = timed(lambda: first_token(model, ids))  # noqa: B023
        extra.append(1e3 * (taken - result.timings.layout - plain))
    low, median, high = statistics.quantiles(extra[3:], n=4)
    return {"median": median, "low": low, "high": high}


def decoding(backend: LocalBackend, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds per generated token after a pruned prefill over those of plain generate."""
    model = backend.model
    _, layout = prompt_of(backend, tokens)
    ids = torch.tensor([layout.input_ids], device=model.device)
    new = 33
    ratios = []
    installation = Installation(model)
    for _ in range(rounds + 1):
        pace = []
        for keep in (None, 0.5):
            monitor = Forced(layout, len(backend.anatomy.layers) // 2, keep) if keep else None
            membership = chunk_membership(layout.chunk_spans, layout.n_tokens)
            run = PrefillRun(installation.anatomy, layout.n_tokens, monitor, membership)

            def answer() -> None:
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
                )

            if keep is None:
                installation.close()
                taken, _ = timed(answer)
                first, _ = timed(lambda: first_token(model, ids))
                installation = Installation(model)
                pace.append((taken - first) / (new - 1))
            else:
                with installation.activate(run):
                    started = time.perf_counter()
                    answer()
                    prefilled = run.stamps.prefilled or started
                    pace.append((time.perf_counter() - prefilled) / (new - 1))
        ratios.append(pace[1] / pace[0])
    installation.close()
    return {"tokens": layout.n_tokens, "pruned_over_plain": spread(ratios[1:])}


class EveryOther(StoppingCriteria):
    """Has the decode monitor look at every other generated token, and times each; stops nothing.

    Attributes:
        seconds: per token, without the monitor and with it.
    """

    def __init__(self, run: PrefillRun, watch: DecodeWatch) -> None:
        self.run, self.watch = run, watch
        self.stop = StopOnDrift(watch)
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        watching = self.run.decode is not None
        done = self.stop(input_ids, scores) if watching else torch.zeros(1, dtype=torch.bool, device=input_ids.device)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.at is not None:
            self.seconds[watching].append(now - self.at)
        self.run.decode = None if watching else self.watch
        self.at = time.perf_counter()
        return done


def monitoring(backend: LocalBackend, tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds per generated token with the decode monitor over those without, token by token in turns.

    The rows are also compared with a threshold, which none passes: the dearest setting.
    """
    model = backend.model
    _, layout = prompt_of(backend, tokens)
    ids = torch.tensor([layout.input_ids], device=model.device)
    forced = Forced(layout, len(backend.anatomy.layers) // 2, 0.5)
    installation = Installation(model)
    ratios = []
    for _ in range(rounds + 1):
        membership = chunk_membership(layout.chunk_spans, layout.n_tokens)
        watch = DecodeWatch(1.0, "stop")
        run = PrefillRun(installation.anatomy, layout.n_tokens, forced, membership, decode=watch)
        turns = EveryOther(run, watch)
        with installation.activate(run):
            arguments = {"max_new_tokens": 65, "min_new_tokens": 65, "do_sample": False, "stopping_criteria": [turns]}
            model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        without, looking = (statistics.median(part[2:]) for part in turns.seconds)
        ratios.append(looking / without)
    installation.close()
    return spread(ratios[1:])


def peak_memory(model: str, dtype: str, tokens: int, kind: str) -> float:
    """Peak memory, MiB, that one prefill adds to a fresh process with the model loaded (on CUDA, on the device)."""
    command = [sys.executable, __file__, "--one", kind, "--model", model, "--dtype", dtype, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def one(model: str, dtype: str, tokens: int, kind: str) -> None:
    backend = LocalBackend.from_pretrained(model, dtype=dtype)
    depth = len(backend.anatomy.layers)
    # Eight layers from a quarter to three quarters of the stack, the last of which prunes to one half.
    monitored = tuple(depth // 4 + i * depth // 15 for i in range(8))

    def prefill(size: int) -> None:
        _, layout = prompt_of(backend, size)
        ids = torch.tensor([layout.input_ids], device=backend.model.device)
        if kind == "plain":
            first_token(backend.model, ids)
            return
        watcher = NeverAccepts(PruningConfig(eps_row=0.9, mass_min=0.0), layout, backend, monitored)
        forced = Forced(layout, monitored[-1], 0.5)

        class Both:
            layers = monitored

            def observe(self, layer: int, read: Any) -> Any:
                watcher.observe(layer, read)
                return forced.observe(layer, read) if layer == monitored[-1] else SimpleNamespace(accepted=False)

        forced_prefill(backend.model, backend._installation, layout, Both(), ids)

    if kind == "plain":
        backend.close()
    prefill(512)  # what libraries allocate once is not a prompt's
    before = reset_peak()
    prefill(tokens)
    print(peak() - before)


def reset_peak() -> float:
    """Forget the peak so far; returns what is held now, MiB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    gc.collect()
    with contextlib.suppress(OSError):  # Linux only; elsewhere the peak of loading stays in the figure
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    """Peak memory of this process (on CUDA, of the device), MiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.is_file():
        return float(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def show(console: Console, result: dict[str, Any]) -> None:
    def words(numbers: dict[str, float], form: str) -> str:
        return f"{numbers['median']:{form}} [{numbers['low']:{form}}, {numbers['high']:{form}}]"

    table = Table(title=f"{result['model']}, {result['dtype']}, {result['threads']} threads; median [low, high]")
    for name in (
        "tokens",
        "plain s",
        "off / plain",
        "rule share",
        "layer",
        "kept",
        "speed-up",
        "ideal",
        "time / ideal",
    ):
        table.add_column(name, justify="right")
    for size in result["sizes"]:
        head = [
            str(size["tokens"]),
            words(size["plain_seconds"], ".2f"),
            words(size["off_over_plain"], ".3f"),
            words(size["rule_share"], ".3f"),
        ]
        for row in size["pruned"]:
            table.add_row(
                *head,
                str(row["layer"]),
                f"{row['kept_share']:.0%}",
                words(row["speedup"], ".2f"),
                f"{row['ideal_speedup']:.2f}",
                words(row["over_ideal"], ".2f"),
            )
            head = [""] * 4
    console.print(table)
    console.print(compared(result, words))
    console.print(f"fixed cost of a call, pruning off: {words(result['fixed_cost_ms'], '.1f')} ms [quartiles]")
    console.print(
        f"decoding, pruned / plain seconds per token: {words(result['decoding']['pruned_over_plain'], '.3f')}; "
        f"pruned with the decode monitor / pruned without: {words(result['decoding']['monitor_over_without'], '.3f')}"
    )
    for entry in result["memory"]:
        console.print(
            f"peak memory that prefill adds at {entry['tokens']} tokens: plain {entry['plain']:.0f} MiB, monitored and "
            f"pruned {entry['pruned']:.0f} MiB"
        )


def compared(result: dict[str, Any], words: Callable[[dict[str, float], str], str]) -> Table:
    """Prediction beside measurement."""
    table = Table(title="What `entroprefill plan` predicts, and what was measured")
    names = ("tokens", "layer", "kept", "speed-up", "measured", "KV MiB", "measured", "looking", "measured")
    for name in names:
        table.add_column(name, justify="right")
    for size in result["sizes"]:
        # The prediction counts the scores; what is measured proposes and judges, too.
        looking = [f"{size['predicted_rule_share']:.2%}", words(size["rule_share"], ".2%")]
        for row in size["pruned"]:
            table.add_row(
                str(size["tokens"]),
                str(row["layer"]),
                f"{row['kept_share']:.0%}",
                f"{row['ideal_speedup']:.2f}",
                words(row["speedup"], ".2f"),
                f"{row['predicted_kv_bytes'] / 2**20:.2f}",
                f"{row['kv_bytes'] / 2**20:.2f}",
                *looking,
            )
            looking = ["", ""]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", default="1024,2048,4096,8000")
    parser.add_argument("--layers", default="8,14,20")
    parser.add_argument("--keep", default="0.25,0.5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = [int(part) for part in given.tokens.split(",")]
    if given.one:
        one(given.model, given.dtype, sizes[0], given.one)
        return
    console = Console()
    dtype = None if given.dtype == "auto" else given.dtype
    backend = LocalBackend.from_pretrained(given.model, dtype=dtype)
    layers = [int(part) for part in given.layers.split(",")]
    keeps = [float(part) for part in given.keep.split(",")]
    result: dict[str, Any] = {
        "model": given.model,
        "dtype": str(backend.model.dtype).removeprefix("torch."),
        "device": str(backend.model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rounds": given.rounds,
        "sizes": [],
    }
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("prefill", total=len(sizes) * (given.rounds + 1))
        for tokens in sizes:
            rounds = given.rounds if tokens <= 4096 else max(2, given.rounds // 2)
            result["sizes"].append(measure(backend, tokens, layers, keeps, rounds, lambda: progress.advance(bar)))
    result["fixed_cost_ms"] = fixed_cost(backend, 8 * given.rounds)
    result["decoding"] = decoding(backend, min(2048, sizes[-1]), given.rounds)
    result["decoding"]["monitor_over_without"] = monitoring(backend, min(2048, sizes[-1]), given.rounds)
    result["memory"] = [
        {
            "tokens": tokens,
            "plain": peak_memory(given.model, result["dtype"], tokens, "plain"),
            "pruned": peak_memory(given.model, result["dtype"], tokens, "pruned"),
        }
        for tokens in sizes[-2:]
    ]
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(console, result)


if __name__ == "__main__":
    main()
