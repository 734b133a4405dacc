"""Whether every derived number of a record follows from its primitive ones. Needs no model."""

from __future__ import annotations

from pydantic import ValidationError

from entroprefill_rag.record import AuditRecord
from entroprefill_rag.verify.audits import check_setup
from entroprefill_rag.verify.facts import config_of, facts_of
from entroprefill_rag.verify.findings import Finding, Findings
from entroprefill_rag.verify.outcome import check_layers, check_outcome
from entroprefill_rag.verify.structure import check_ranges, check_structure
from entroprefill_rag.verify.verdicts import check_trials


def check(record: AuditRecord) -> list[Finding]:
    """Everything in a record that does not follow from the rest of it.

    What a record alone cannot show is listed in :data:`.limits.LIMITS`. An empty answer says that the record is
    consistent, not that it is true: masses could be invented as a whole.

    Args:
        record: any record.

    Returns:
        Findings in the order of the record; empty where everything follows.
    """
    found = Findings()
    try:
        config, plugged_in = config_of(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return [Finding(f"config.{place}".rstrip("."), first.get("input"), first["msg"], "a valid configuration")]
    with found.part("prompt"):
        if check_ranges(record, found):
            facts = facts_of(record, config, plugged_in)
            for part, name in (
                (check_structure, "prompt"),
                (check_layers, "layers"),
                (check_setup, "audit"),
                (check_trials, "trials"),
                (check_outcome, "outcome"),
            ):
                with found.part(name):
                    part(facts, found)
    return found.found
