"""Finds existing n-gram tables of a target: the shipped one and those of its other plans.

A calibration uses the largest table of its target, unless ``--table-tokens`` or ``--own-table`` is given.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from yggdrasil.artifacts import list_plans
from yggdrasil.calibration.calibration_settings import CalibrationSettings, PairSource
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.calibration.statistics.learning import LearnedStatistics
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.shipped_assets import table_folder
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.errors import ArtifactError
from yggdrasil.scheduling.plan import Plan

SHIPPED = "Yggdrasil's package"


class KnownTable(NamedTuple):
    """An n-gram table of the target and the scorer that was fitted with it."""

    scorer: NGramScorer
    table: Table  # its ``origin`` names the plan or package that it is from

    def __str__(self) -> str:
        return f"an n-gram table of {self.table.num_tokens:,} tokens from {self.table.origin}"


def largest_table(settings: CalibrationSettings) -> KnownTable | None:
    """Return the n-gram table with most tokens among the shipped one and those of the target's other plans.

    None if there is no table, or ``settings`` ask for a table of their own or for none.
    """
    pair = settings.pair
    wanted = pair.counts
    if wanted is None or not wanted.table or settings.table_tokens is not None or settings.own_table:
        return None
    known = [*_shipped(pair), *_of_plans(pair, wanted)]
    return max(known, key=lambda each: each.table.num_tokens, default=None)


def announce_table(known: KnownTable | None, reporter: Reporter) -> None:
    """Report, before anything is measured, that the existing table ``known`` may be used; nothing for None."""
    if known is not None:
        reporter.phase(f"using {known}, if this calibration counts fewer (--own-table uses its own)")(1.0)


def with_larger_table(counted: LearnedStatistics | None, known: KnownTable | None) -> LearnedStatistics | None:
    """Return the calibration's n-gram statistics, with the existing table and its scorer if that table has more tokens.

    The expected speeds remain those of the calibration's own table: its documents may be part of the existing table,
    which would then be tested on text that it has counted.

    Args:
        counted: statistics of this calibration; None without n-gram statistics, and then the result is None.
        known: an existing table of the target; None if there is none.
    """
    if counted is None or known is None:
        return counted
    if counted.table is not None and known.table.num_tokens <= counted.table.num_tokens:
        return counted
    return counted._replace(scorer=known.scorer, table=known.table, documents=())


def _shipped(pair: PairSource) -> Iterator[KnownTable]:
    """Yield the shipped table. It is valid for the file's own weights, dequantised or not."""
    is_rounded = pair.weights not in ("file", "full")
    folder = None if is_rounded else table_folder(Source.find(pair.target).fingerprint())
    if folder is not None:
        yield from _read(folder, SHIPPED)


def _of_plans(pair: PairSource, wanted: StatisticsOptions) -> Iterator[KnownTable]:
    """Yield the tables of all plans of this target, of any machine; damaged files are skipped."""
    target = Source.find(pair.target).fingerprint(), pair.weights
    for entry in list_plans():
        try:
            plan = Plan.load(entry.path)
        except ArtifactError:
            continue
        if (plan.target.fingerprint, plan.target.weights) == target and wanted in plan.model_free:
            yield from _read(entry.path.parent / plan.predictor, f"the plan {entry.name} ({entry.slug})")


def _read(folder: Path, origin: str) -> Iterator[KnownTable]:
    try:
        scorer, table = NGramScorer.load(folder / SCORER_FILE), Table.load(folder / TABLE_FILE)
    except ArtifactError:
        return
    yield KnownTable(scorer, table.taken_from(table.origin or origin))
