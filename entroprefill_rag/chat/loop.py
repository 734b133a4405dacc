"""Read a line, answer it or do what it says, go on: whatever happens inside an answer, the chat lives."""

from __future__ import annotations

from collections.abc import Callable

from entroprefill_rag.chat.commands import Quit, run_command
from entroprefill_rag.chat.screen import Screen
from entroprefill_rag.chat.session import ChatSession


def converse(session: ChatSession, screen: Screen, explain: Callable[[Exception], str]) -> bool:
    """Chat until somebody leaves or there are no more lines.

    At a terminal an interrupt stops an answer; the next one, at the prompt, leaves. In a pipe it stops an answer too,
    and leaves while waiting for a line.

    Args:
        session: answers.
        screen: reads and writes.
        explain: one line for what went wrong.

    Returns:
        Whether every line was answered.

    Raises:
        KeyboardInterrupt: while waiting for a line of a pipe.
    """
    well, interrupted = True, False
    while True:
        try:
            line = screen.read()
        except KeyboardInterrupt:
            if not screen.interactive:
                raise
            if interrupted:
                screen.show("")
                return well
            interrupted = True
            screen.stopped()
            continue
        if line is None:
            return well
        if not line.strip():
            continue
        interrupted = False
        try:
            if line.startswith("/"):
                run_command(line, session, screen)
            else:
                _answer(line, session, screen)
        except Quit:
            return well
        except KeyboardInterrupt:
            interrupted = True
            screen.stopped()
        except BrokenPipeError:
            raise
        except Exception as error:
            well = False
            screen.error(explain(error))


def _answer(question: str, session: ChatSession, screen: Screen) -> None:
    screen.answer(session.ask(question.strip()))
    screen.citations(session.asked())
