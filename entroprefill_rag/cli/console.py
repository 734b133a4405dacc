"""Where commands write, how they fail, and how they keep other libraries quiet."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from pydantic import ValidationError
    from rich.console import Console

_P = ParamSpec("_P")
_R = TypeVar("_R")

BAD_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
_WIDTH_OF_PIPES = 100


def console(*, stderr: bool = False) -> Console:
    """A console that takes every string literally: no markup, no emoji codes, no highlighting."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with a code of its own
            raise  # the error that is being handled

    # A closed stream is None.
    stream = (sys.stderr if stderr else sys.stdout) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_PIPES
    return Ours(file=stream, markup=False, emoji=False, highlight=False, width=width)


def note(text: str) -> None:
    """A line for the person at the terminal, on stderr."""
    from rich.text import Text

    from entroprefill_rag.report.plain import one_line

    console(stderr=True).print(Text(one_line(text, 400), style="dim"))


def guarded(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turn what a command raises into one line on stderr and an exit code; a traceback only with ``--verbose``."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        verbose = bool(kwargs.get("verbose"))
        with _quiet(verbose):
            try:
                return command(*args, **kwargs)
            except KeyboardInterrupt:
                typer.echo("\nentroprefill: interrupted", err=True)
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:
                # The reader of our output has left; the flush at exit must not fail on it again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise typer.Exit(PIPE_CLOSED) from None
            except typer.Exit:
                raise
            except Exception as error:
                if hasattr(error, "format_message"):  # typer's own
                    raise
                if verbose:
                    traceback.print_exc()
                message, code = explained(error)
                typer.echo(f"entroprefill: {message}", err=True)
                raise typer.Exit(code) from None

    return run


def explained(error: Exception) -> tuple[str, int]:
    """What an exception says to a person, on one line, and the exit code it stands for."""
    from pydantic import ValidationError

    from entroprefill_rag.errors import EntroPrefillError, PromptOverflowError
    from entroprefill_rag.report.plain import one_line

    if isinstance(error, ValidationError):
        return one_line(validation_message(error), 1000), BAD_INPUT
    if isinstance(error, PromptOverflowError):
        return one_line(f"{error} (here: --top-k, --max-new-tokens, or overflow in a --config file)", 1000), BAD_INPUT
    if isinstance(error, EntroPrefillError):
        return one_line(str(error), 1000), BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        return one_line(f"{error.filename}: {error.strerror or type(error).__name__}", 1000), BAD_INPUT
    if isinstance(error, OSError) and error.errno is not None:
        return one_line(f"a file cannot be read or written: {error.strerror or type(error).__name__}", 1000), BAD_INPUT
    if isinstance(error, UnicodeDecodeError):
        return f"a file is not text in {error.encoding.upper()} (byte {error.start}); convert it first", BAD_INPUT
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read", BAD_INPUT
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; run: pip install -e '.[cli]' in a clone", BAD_INPUT
    # Messages of other libraries may quote the prompt: only their first line's beginning is shown.
    return one_line(f"unexpected {type(error).__name__}: {error} (--verbose shows where)", 300), 1


def explainer(*, verbose: bool) -> Callable[[Exception], str]:
    """For programs that go on after an error: what it says, on one line; its traceback too with ``--verbose``."""

    def explain(error: Exception) -> str:
        if verbose:
            traceback.print_exception(error)
        return explained(error)[0]

    return explain


def validation_message(error: ValidationError) -> str:
    """The first thing wrong with a request or configuration, and how many more there are; no input values."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    place = ".".join(map(str, problems[0]["loc"]))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    what = problems[0]["msg"].removeprefix("Value error, ")
    return f"{error.title}{f', {place}' if place else ''}: {what}{more}"


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Keep libraries from writing between our lines. Document text is logged by nobody, verbose or not."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # pypdf quotes what it stumbles over.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    if verbose:
        yield
        return
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        os.environ.setdefault(name, "1")
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in ("sentence_transformers", "huggingface_hub", "transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), _no_loading_bars():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _no_loading_bars() -> Iterator[None]:
    # transformers reads the variable above when it is imported; a program that imported it before us has its own bars.
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
