"""What other calibrations of the same target have counted: a table is the target's, on whatever machine it was made."""

from collections.abc import Iterator
from typing import NamedTuple

from yggdrasil.artifacts import list_plans
from yggdrasil.calibration.counted import Counted
from yggdrasil.calibration.job import Job
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.counts import BELIEF_FILE, TABLE_FILE
from yggdrasil.drafters.options import CountsOptions
from yggdrasil.drafters.table import Table
from yggdrasil.errors import ArtifactError
from yggdrasil.scheduling.plan import Plan


class _Known(NamedTuple):
    """What a plan's drafter that counts has learned."""

    plan: str
    belief: Belief
    table: Table


def with_largest_table(job: Job, counted: Counted | None) -> Counted | None:
    """``counted`` with another plan's table, and the belief beside it, where that counts more of the target's text.

    What is expected of counts alone stays: it may have been foreseen by the very answers that the other counts. A
    calibration that was told how much text to write takes no other table.
    """
    wanted = job.pair.counts
    if counted is None or wanted is None or not wanted.table or job.settings.table_tokens is not None:
        return counted
    best = max(_others(job, wanted), key=lambda known: known.table.num_tokens, default=None)
    if best is None or (counted.table is not None and best.table.num_tokens <= counted.table.num_tokens):
        return counted
    told = job.reporter.phase(f"taking the table of {best.plan}, of {best.table.num_tokens:,} tokens")
    told(1.0)
    return counted._replace(belief=best.belief, table=best.table, documents=())


def _others(job: Job, wanted: CountsOptions) -> Iterator[_Known]:
    """Of every plan of this target, on whatever machine; what is damaged is left out."""
    target = Source.find(job.pair.target).fingerprint(), job.pair.weights
    for entry in list_plans():
        try:
            plan = Plan.load(entry.path)
            if (plan.target.fingerprint, plan.target.weights) == target and wanted in plan.free:
                folder = entry.path.parent / plan.predictor
                name = f"{entry.name} ({entry.slug})"
                yield _Known(name, Belief.load(folder / BELIEF_FILE), Table.load(folder / TABLE_FILE))
        except ArtifactError:
            continue
