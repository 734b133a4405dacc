"""The run: questions in turn, methods in a drawn order, every row written at once, until the time is over."""

from __future__ import annotations

import hashlib
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entroprefill_rag import __version__
from entroprefill_rag.bench.methods import Method
from entroprefill_rag.bench.questions import Question
from entroprefill_rag.bench.rankers import seed_of
from entroprefill_rag.bench.rows import FORMAT, Row, Store
from entroprefill_rag.bench.runner import Heard, Outcome, Runner, agreement

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend


def stamp_of(backend: LocalBackend, **settings: Any) -> dict[str, Any]:
    """What rows must share to stand beside each other: model, versions, machine and the run's settings."""
    import torch
    import transformers

    info = backend.model_info
    return {
        "format": FORMAT,
        "model": info.name,
        "fingerprint": info.fingerprint,
        "dtype": info.dtype,
        "device": info.device,
        "kernel": info.kernel,
        "profile": backend.profile.name if backend.profile is not None else None,
        "entroprefill": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **settings,
    }


def digest_of(stamp: dict[str, Any]) -> str:
    """Names a stamp in a few characters."""
    told = "\n".join(f"{name}={stamp[name]}" for name in sorted(stamp))
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:12]


@dataclass
class Session:
    """One run, or the rest of one.

    Args:
        runner: answers.
        methods: the full run is among them.
        store: where rows go.
        stamp: of this run's rows.
        seed: of the order of methods.
        minutes: no question is begun that would probably end later; None: no limit.
    """

    runner: Runner
    methods: Sequence[Method]
    store: Store
    stamp: dict[str, Any]
    seed: int = 0
    minutes: float | None = None

    def go(self, questions: Sequence[Question], progress: Callable[[int, int, str], None] | None = None) -> bool:
        """Do what is not done yet.

        Args:
            questions: in the order in which they are asked.
            progress: is told how many of how many answers there are, and what comes next.

        Returns:
            Whether all was done, before the time was over.
        """
        done = {row.key for row in self.store.rows(self.stamp)}
        started, longest, finished = time.perf_counter(), 0.0, 0
        total = len(questions) * len(self.methods)
        for question in questions:
            left = [m for m in self.methods if (question.set, question.id, m.name, m.digest) not in done]
            finished += len(self.methods) - len(left)
            if not left:
                continue
            began = time.perf_counter()
            if self.minutes is not None and began - started + longest > 60 * self.minutes:
                return False
            for name in self._ask(question, left):
                if progress is not None:
                    progress(finished, total, f"{question.set}: {name}")
                finished += 1
            longest = max(longest, time.perf_counter() - began)
        if progress is not None:
            progress(finished, total, "done")
        return True

    def _ask(self, question: Question, left: Sequence[Method]) -> Any:
        """Run the methods of one question; gives each one's name before it is run.

        Rows wait for the full run of their question, which they are compared with. Where an earlier run has its row
        already, it is run once more, and not written.
        """
        full = next(method for method in self.methods if method.kind == "full")
        order = list(left)
        random.Random(seed_of(self.seed, "order", question.set, question.id)).shuffle(order)
        compared, heard = False, None
        if full not in order:
            compared, heard = True, self.runner.run(full, question).heard
        waiting: list[tuple[int, Outcome]] = []
        for place, method in enumerate(order):
            yield method.name
            outcome = self.runner.run(method, question)
            waiting.append((place, outcome))
            if method.kind == "full":
                compared, heard = True, outcome.heard
            if compared:
                self._write(waiting, heard)
                waiting = []

    def _write(self, waiting: Sequence[tuple[int, Outcome]], full: Heard | None) -> None:
        self.store.append(
            Row(stamp=self.stamp, place=place, **outcome.told, **agreement(full, outcome.heard))
            for place, outcome in waiting
        )
