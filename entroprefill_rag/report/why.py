"""Why a chunk stayed that ranked among those to go: read off a record, head by head."""

from __future__ import annotations

from math import ceil, floor

import numpy as np
from pydantic import ValidationError

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.record import AuditRecord
from entroprefill_rag.rule.removal import RemovalProblem, row_caps, within_reach


def held_back(record: AuditRecord) -> dict[int, str]:
    """Chunks of a pruned prompt, by position, that ranked among the lowest and stayed: what held each of them.

    Only where the order had an end (``reach="target"``): else greedy tried every chunk, and all that stayed were held.
    """
    trial = record.trial
    if record.outcome != "pruned" or trial is None or not trial.row_max or not trial.scores:
        return {}
    try:
        config = PruningConfig.model_validate({**record.config, "head_weights": "renyi"})
    except ValidationError:  # settings of another version: shown as they are written, and nothing is derived from them
        return {}
    tokens = np.array([chunk.end - chunk.start for chunk in record.prompt.chunks], dtype=np.int64)
    total, maxima = int(tokens.sum()), np.array(trial.row_max)
    most = floor(config.max_saving * total + 1e-9)
    cap = row_caps(config.eps_row, max(len(record.proposal_rows), 1)).max()
    problem = RemovalProblem(
        masses=maxima[:, None, :],
        caps=np.full((len(maxima), 1), cap),
        tokens=tokens,
        removable=np.array([chunk.protected is None for chunk in record.prompt.chunks], dtype=np.bool_),
        m0=config.m0,
        target_tokens=min(ceil(config.target_saving * total - 1e-9), most),
        max_tokens=most,
    )
    scores = np.array(trial.scores)
    tried = within_reach(problem, scores) if config.reach == "target" else problem.removable
    found = {}
    for place in np.flatnonzero(tried).tolist():
        if place in trial.removed:
            continue
        head = int(maxima[:, place].argmax())
        mass = float(maxima[head, place])
        alone = mass > cap
        found[place] = (
            f"held by a cap: head {head} gives it {mass:.2f}"
            if alone
            else "held by a cap: with the others, a row would lose too much"
        )
    return found
