"""``entroprefill certify``: the fastest configuration whose expected loss on a workload is shown to be small."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.calibrate import _counting
from entroprefill_rag.cli.console import console, guarded, note

if TYPE_CHECKING:
    from rich.table import Table

    from entroprefill_rag.calibration.profile import ModelProfile
    from entroprefill_rag.certificate.result import Certificate, LossName, Tested
    from entroprefill_rag.config import PruningConfig


@guarded
def certify(
    requests: Annotated[
        Path,
        typer.Option(
            "--requests", help="Held-out requests, one in JSON a line: as --save-request writes, or labelled questions."
        ),
    ],
    loss: Annotated[
        str, typer.Option("--loss", help="answer_changed, gold_lost (needs labels) or discarded_mass.")
    ] = "answer_changed",
    alpha: Annotated[float, typer.Option("--alpha", help="The expected loss must be shown to be below this.")] = 0.1,
    delta: Annotated[float, typer.Option("--delta", help="Probability of certifying falsely.")] = 0.05,
    grid: Annotated[
        Path | None,
        typer.Option("--grid", help="Changes to the configuration as a JSON list, safest first; default: seven steps."),
    ] = None,
    config: given.Config = None,
    model: given.Model = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="A profile that calibrate wrote; default: the shipped one.")
    ] = None,
    max_new_tokens: given.MaxNewTokens = 32,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the audits' draws while measuring; default: fresh ones.", min=0)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Keep what is measured in this file, and go on from it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the certificate to this file.")] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", help="Measure with the profile of this file, and add the certificate to it."),
    ] = None,
    config_out: Annotated[
        Path | None, typer.Option("--config-out", help="Write the chosen configuration, for ask --config.")
    ] = None,
    device: given.Device = None,
    dtype: given.DType = None,
    as_json: given.AsJson = False,
    verbose: given.Verbose = False,
) -> None:
    """Certify a configuration for a workload: expected loss below alpha, with probability at least 1 - delta.

    The statement is about requests like these, on average; docs/certificate.md says what it is not.
    """
    from entroprefill_rag.certificate.grid import configurations, default_grid, read_grid
    from entroprefill_rag.certificate.requests import read_requests
    from entroprefill_rag.certificate.run import certify as run
    from entroprefill_rag.certificate.run import check_levels, usable
    from entroprefill_rag.cli import inputs
    from entroprefill_rag.cli.progress import waiting

    inputs.check_outputs({"--out": out, "--config-out": config_out, "--resume": resume})
    name = _loss(loss)
    holder = _holder(into, profile)
    base = inputs.load_config(config, enabled=True, seed=None)
    places = default_grid() if grid is None else read_grid(grid)
    configurations(base, places)
    asked = read_requests(requests)
    kept, _ = usable(asked, name)
    check_levels(len(kept), alpha, delta)
    with waiting("Loading the model"):
        from entroprefill_rag.engine.backend import LocalBackend

        backend = LocalBackend.from_pretrained(model, device=device, dtype=dtype, profile=holder or profile)
    with closing(backend), _counting("Measuring") as told:
        found = run(
            backend,
            asked,
            alpha=alpha,
            delta=delta,
            loss=name,
            base=base,
            grid=places,
            max_new_tokens=max_new_tokens,
            seed=seed,
            resume=resume,
            progress=told,
        )
    if out is not None:
        out.write_text(found.to_json(), encoding="utf-8")
    if into is not None and holder is not None:
        into.write_text(holder.with_certificate(found).to_json(), encoding="utf-8")
    _write_config(found, config_out, into or profile)
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json")))
        return
    _report(found)
    if out is None and into is None:
        note("note: the certificate was not written; give --out FILE, or --into PROFILE, to keep it")


def _holder(into: Path | None, profile: Path | None) -> ModelProfile | None:
    """The profile that the certificate goes into; None without one.

    Raises:
        CertificateError: another profile is to be measured with.
        ProfileError: the file is no profile.
    """
    from entroprefill_rag.calibration.profile import ModelProfile
    from entroprefill_rag.errors import CertificateError

    if into is None:
        return None
    if profile is not None and profile.absolute() != into.absolute():
        raise CertificateError(
            f"--into {str(into)!r} and --profile {str(profile)!r} name two profiles; a certificate goes into the one "
            "it was measured with: leave --profile out"
        )
    return ModelProfile.read(into)


def _loss(text: str) -> LossName:
    from typing import get_args

    from entroprefill_rag.certificate.result import LossName
    from entroprefill_rag.errors import CertificateError

    known: tuple[LossName, ...] = get_args(LossName)
    for name in known:
        if text == name:
            return name
    raise CertificateError(f"--loss {text!r} is not known; choose from {', '.join(known)}")


def _write_config(found: Certificate, path: Path | None, profile: Path | None) -> None:
    if path is None:
        return
    chosen: PruningConfig | None = found.pruning_config()
    if chosen is None:
        note("note: nothing is certified, so no configuration was written")
        return
    path.write_text(json.dumps(found.config, indent=1) + "\n", encoding="utf-8")
    if profile is not None:
        note("note: certified with the profile of --profile; run it as LocalBackend(profile=FILE)")


def _report(found: Certificate) -> None:
    from rich.text import Text

    from entroprefill_rag.report.plain import one_line

    out = console()
    out.print(_table(found))
    left = ", ".join(f"{count} {why}" for why, count in found.requests.left_out.items())
    lines = [
        f"{found.requests.n} requests{f' (left out: {left})' if left else ''}; {found.model}, profile "
        f"{found.profile or 'none'}."
    ]
    if found.claim.probabilistic is None:
        lines.append(f"Nothing is certified: the first configuration's p-value is above {found.delta:g}.")
    else:
        lines.append(found.claim.probabilistic)
    lines += [f"If: {text}" for text in found.claim.assumes]
    lines += [f"Not claimed: {text}." for text in found.claim.not_claimed]
    for line in lines:
        out.print(Text(one_line(line, 1000)))


def _table(found: Certificate) -> Table:
    """One line per configuration, in the order tested."""
    from rich.table import Table
    from rich.text import Text

    from entroprefill_rag.report.plain import one_line

    table = Table(
        title=f"{found.loss}: expected loss below {found.alpha:g}, error at most {found.delta:g}", title_justify="left"
    )
    for name in ("", "changes", "mean loss", "p-value", "pruned", "work saved", "certified"):
        table.add_column(name, justify="left" if name == "changes" else "right")
    for at, one in enumerate(found.grid):
        changes = one_line(", ".join(_words(one.changes)), 200)
        table.add_row(f"{'*' if at == found.chosen else ''}{at + 1}", Text(changes), *_cells(one))
    table.caption = "*: chosen. work saved: share of tokens x layers. -: not measured, since testing had ended."
    table.caption_justify = "left"
    return table


def _words(changes: dict[str, object], before: str = "") -> list[str]:
    found = []
    for name, value in changes.items():
        found += _words(value, f"{name}.") if isinstance(value, dict) else [f"{before}{name} {value}"]
    return found


def _cells(one: Tested) -> tuple[str, ...]:
    seen = one.measured
    if seen is None:
        return ("-", "-", "-", "-", "no")
    certified = "yes" if one.certified else "no"
    return f"{seen.mean_loss:.3f}", f"{seen.p_value:.3g}", str(seen.pruned), f"{seen.saved_work:.1%}", certified
