"""``entroprefill serve``: a page to ask a store of documents from a browser, on this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import explainer, guarded, note

if TYPE_CHECKING:
    from entroprefill_rag.app.loading import Loaded, Tell

EXAMPLES = """Examples

entroprefill serve --docs contracts/

ENTROPREFILL_TOKEN=... entroprefill serve --docs contracts/ --host 0.0.0.0 --allow-host nas.home
"""
_INSTALL = "pip install -e '.[serve]' in a clone"
_SHORTEST_TOKEN = 16
_WHERE = "Where it is served"


@guarded
def serve(
    docs: given.Docs = None,
    top_k: given.TopK = 20,
    embedder: given.EmbedderName = None,
    no_cache: given.NoCache = False,
    model: given.Model = None,
    no_prune: given.NoPrune = False,
    config: given.Config = None,
    max_new_tokens: given.MaxNewTokens = 256,
    device: given.Device = None,
    dtype: given.DType = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at.", rich_help_panel=_WHERE, show_default=True)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="0: any that is free.", min=0, max=65535, rich_help_panel=_WHERE)
    ] = 8137,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A name by which browsers may ask; again for more.", rich_help_panel=_WHERE),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="ENTROPREFILL_TOKEN",
            show_envvar=True,
            help=f"What a browser must give first, {_SHORTEST_TOKEN} characters or more. Needed beyond this machine.",
            rich_help_panel=_WHERE,
            show_default=False,
        ),
    ] = None,
    uploads: Annotated[
        bool,
        typer.Option("--uploads/--no-uploads", help="Whether browsers may add documents.", rich_help_panel=_WHERE),
    ] = True,
    verbose: given.Verbose = False,
) -> None:
    """Ask from a browser: streamed answers, sources kept and dropped, the audit, and the same without pruning.

    The page is at http://127.0.0.1:8137, for this machine only. Ctrl-C stops it.
    """
    from entroprefill_rag.cli import inputs
    from entroprefill_rag.errors import DocumentError

    try:
        import uvicorn

        from entroprefill_rag.app.loading import Loading
        from entroprefill_rag.app.server import Page
        from entroprefill_rag.app.visits import UploadLimits
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette"):
            raise
        raise typer.BadParameter(f"the page needs {error.name}, which is not installed; run: {_INSTALL}") from None
    settings = inputs.load_config(config, enabled=not no_prune, seed=None)
    if docs is not None and not docs.exists():
        raise DocumentError(f"{str(docs)!r} does not exist; give a folder or a file of documents")
    hosts = _hosts(host, allow_host or [], token)

    explain = explainer(verbose=verbose)

    def failed(error: Exception) -> str:
        text = explain(error)
        note(f"loading failed: {text}")
        return text

    def load(tell: Tell) -> Loaded:
        loaded = _load(tell, docs, embedder, model, device, dtype, cache=not no_cache)
        note(f"ready: {loaded.backend.name}")
        return loaded

    page = Page(
        Loading(load, failed), explain, settings, top_k, max_new_tokens, UploadLimits() if uploads else None, token
    )
    page.folder = "" if docs is None else docs.resolve().name
    with closing(_listening(host, port)) as listening:
        address = listening.getsockname()[:2]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        typer.echo(f"http://{shown}:{address[1]}/")
        if token is not None:
            note("Whoever has the token can ask. The connection is not encrypted: put a proxy with TLS before it.")
        server = uvicorn.Server(
            uvicorn.Config(
                page.application(hosts),
                log_level="info" if verbose else "error",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            note("stopped")


def _hosts(host: str, names: list[str], token: str | None) -> set[str] | None:
    """The names that are served; None: any address in figures."""
    loopback = host == "localhost"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        wildcard = False
    else:
        loopback, wildcard = address.is_loopback, address.is_unspecified
    if not loopback and token is None:
        raise typer.BadParameter(
            f"--host {host} can be reached by others: give a --token (or ENTROPREFILL_TOKEN) that they must know, or "
            "leave --host out and use an SSH tunnel"
        )
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise typer.BadParameter(f"the token has {len(token)} characters, {_SHORTEST_TOKEN} or more are needed")
    if wildcard and not names:
        return None
    return {"localhost", "127.0.0.1", "::1", host.lower(), *(name.lower() for name in names)}


def _listening(host: str, port: int) -> socket.socket:
    """A socket of our own, so that an address that is taken is said at once, and port 0 has a number."""
    from entroprefill_rag.errors import RequestError

    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen()  # whoever opens the address as soon as it is shown waits, and is not turned away
        except OSError:
            made.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"cannot listen at {host} port {port}: {why}; try another --port (0: any)") from error
    return made


def _load(
    tell: Tell,
    docs: Path | None,
    embedder: str | None,
    model: str | None,
    device: str | None,
    dtype: str | None,
    *,
    cache: bool,
) -> Loaded:
    from entroprefill_rag.app.loading import Loaded
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.engine.sources import resolve_model
    from entroprefill_rag.retrieval import FolderIndex, SentenceEmbedder

    name = resolve_model(model)  # before documents are read: what is missing should be said at once
    finder = SentenceEmbedder(embedder, device=device)
    base = None
    if docs is not None:
        base = FolderIndex.open(docs, finder, cache=cache, progress=tell)
    tell("loading the model", 0, 0)
    backend = LocalBackend.from_pretrained(name, device=device, dtype=dtype)
    tell("loading the embedder", 0, 0)
    finder.query("it loads on first use, and the first question should not wait for it")
    return Loaded(backend, finder, base)
