"""Fits n-gram statistics on the target's text: table, scorer, and their predicted speed."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.statistics.prediction import predict_model_free
from yggdrasil.calibration.statistics.scorer_fit import fit_scorer
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.protocol import Drafter, DrafterGroup
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import least_useful_probability
from yggdrasil.scheduling.plan import Expectation

_HELD_OUT_EVERY = 10  # one document in so many is for the prediction, the others for fitting


class LearnedStatistics(NamedTuple):
    """A scorer, a table of all documents, and the expected speeds on held-out documents.

    Without ``documents`` the expected speeds are empty and there is no table, or the table is of another plan.
    """

    scorer: NGramScorer
    table: Table | None
    expected: list[Expectation]
    documents: Sequence[Document] = ()

    def options(self) -> StatisticsOptions:
        """Return the options of the n-gram statistics drafter as a plan records them."""
        return StatisticsOptions(table=self.table is not None)

    def drafter_without(self, documents: Sequence[Document]) -> StatisticsDrafter:
        """Return a drafter whose n-gram table excludes answers to the prompts of ``documents``, for a fair evaluation.

        If the table's documents are unknown, the counts of ``documents`` are subtracted from it.
        """
        asked = {document.prompt_key for document in documents}
        others = [document for document in self.documents if document.prompt_key not in asked]
        table = self.table
        if table is not None:
            table = Table.of(others).without_rare() if self.documents else table.minus(Table.of(documents))
        return StatisticsDrafter(self.scorer, table)

    def save(self, folder: Path) -> None:
        """Write the n-gram scorer, and the n-gram table if there is one, to ``folder``."""
        self.scorer.save(folder / SCORER_FILE)
        if self.table is not None:
            self.table.save(folder / TABLE_FILE)


def fit_statistics(
    documents: Sequence[Document], costs: StepCosts, *, with_table: bool, others: Sequence[Drafter] = ()
) -> LearnedStatistics:
    """Fit the n-gram scorer on 9 of 10 documents, predict the speed on the others, and count all in a table.

    Args:
        documents: prompts and the target's answers.
        costs: step costs in milliseconds, for the predicted speed.
        with_table: make an n-gram table; if False, only the text of the request is counted.
        others: model-free drafters that draft in the same tree.
    """
    if not documents:
        return LearnedStatistics(NGramScorer.default(with_table=False), None, [])
    held_out = documents[::_HELD_OUT_EVERY]
    rest = [document for i, document in enumerate(documents) if i % _HELD_OUT_EVERY]
    scorer = fit_scorer(rest, with_table=with_table)
    drafter = StatisticsDrafter(scorer, Table.of(rest).without_rare() if with_table else None)
    drafter.leave_out_below(least_useful_probability([costs]))
    is_predicted = any(len(document.answer) > 1 for document in held_out)
    expected = predict_model_free(DrafterGroup([*others, drafter]), held_out, costs) if is_predicted else []
    return LearnedStatistics(scorer, Table.of(documents).without_rare() if with_table else None, expected, documents)
