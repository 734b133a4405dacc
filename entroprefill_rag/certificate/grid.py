"""The ordered grid: configurations from the safest to the fastest, fixed before any request is measured.

A place of the grid is a few changes on top of a base configuration. The order is the order of testing, so it decides
what can be certified at all; it must come from anywhere but the losses on the requests that are tested.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import CertificateError

Changes = dict[str, Any]

# Cap on rows and audit, and target; no step asks for less than the one before it.
_STEPS = ((0.05, 0.25), (0.1, 0.25), (0.1, 0.5), (0.2, 0.5), (0.3, 0.5), (0.4, 0.5), (0.5, 0.5))
_MOST = 64


def default_grid() -> tuple[Changes, ...]:
    """Caps of 0.05 to 0.5 on rows and audit alike, with a target of a quarter, then half of the chunk tokens."""
    return tuple({"eps_row": cap, "target_saving": target, "audit": {"eps_audit": cap}} for cap, target in _STEPS)


def read_grid(path: Path) -> tuple[Changes, ...]:
    """A grid from a file: a JSON list of changes, in the order of testing.

    Raises:
        CertificateError: the file is no such list.
    """
    try:
        found: Any = json.loads(path.read_bytes())
    except ValueError:
        raise CertificateError(f"grid {str(path)!r} is not JSON; it must list changes to a PruningConfig") from None
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise CertificateError(
            f"grid {str(path)!r} must be a list of objects, each with changes to a PruningConfig, safest first, as in "
            '[{"eps_row": 0.1, "audit": {"eps_audit": 0.1}}]'
        )
    if len(found) > _MOST:
        raise CertificateError(f"grid {str(path)!r} has {len(found)} places, and {_MOST} is the most; leave some out")
    return tuple(found)


def settings_of(config: PruningConfig) -> Changes:
    """What a configuration sets, as JSON data: a profile fills in only what was left unset."""
    said = config.model_dump(mode="json")
    # Only two levels are looked into: below them, what is unset also names the kind of an observer.
    audit = {name: value for name, value in said["audit"].items() if name in config.audit.model_fields_set}
    return {name: audit if name == "audit" else said[name] for name in said if name in config.model_fields_set}


def apply(base: PruningConfig, changes: Changes, *, place: int) -> PruningConfig:
    """The configuration at one place of the grid.

    Args:
        base: what all places share.
        changes: what this place sets.
        place: counted from 0, for messages.

    Raises:
        CertificateError: the changes make no valid configuration.
    """
    merged = settings_of(base)
    for name, value in changes.items():
        nested = name == "audit" and isinstance(value, dict)
        merged[name] = {**merged.get("audit", {}), **value} if nested else value
    try:
        return PruningConfig.model_validate(merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "together"
        raise CertificateError(
            f"place {place + 1} of the grid is no valid configuration: {where}: {first['msg']}; see "
            "docs/configuration.md for what may be set"
        ) from None


def configurations(base: PruningConfig, grid: tuple[Changes, ...]) -> tuple[PruningConfig, ...]:
    """All configurations of a grid, checked before anything slow begins.

    Raises:
        CertificateError: no place, an invalid one, two that are the same, or a base that cannot be certified.
    """
    if not grid:
        raise CertificateError("the grid is empty; it needs one configuration at least")
    if callable(base.head_weights):
        raise CertificateError("head_weights is a callable, which a certificate cannot hold; use a name or a profile")
    made = tuple(apply(base, changes, place=place) for place, changes in enumerate(grid))
    for place, config in enumerate(made):
        if config in made[:place]:
            raise CertificateError(f"place {place + 1} of the grid is the same as an earlier one; leave one out")
        if config.overflow != base.overflow:
            raise CertificateError(f"place {place + 1} of the grid changes overflow; set it for all of them (--config)")
        if not config.enabled:
            raise CertificateError(f"place {place + 1} of the grid has enabled=false: it removes nothing; leave it out")
        if config.audit.attempts != "each":
            raise CertificateError(
                "audit.attempts='all' makes a request's audit depend on how often it was asked before, so its loss has "
                "no fixed expectation; use 'each'"
            )
        if config.audit.seed is not None:
            raise CertificateError(
                f"audit.seed={config.audit.seed} would give every request the same seed; leave it out, and pass --seed "
                "for measurements that can be repeated"
            )
    return made
