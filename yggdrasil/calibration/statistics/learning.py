"""Fits n-gram statistics on the target's text: table, scorer, and their predicted speed."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.statistics.base_table import BaseTable, count_documents
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

_HELD_OUT_EVERY = 10  # one document in so many is for the predicted speed, the others for fitting


class LearnedStatistics(NamedTuple):
    """A scorer, a table of all documents, and the expected speeds on held-out documents.

    Without ``documents`` the expected speeds are empty and there is no table.
    """

    scorer: NGramScorer
    table: Table | None
    expected: list[Expectation]
    documents: Sequence[Document] = ()
    base: BaseTable | None = None  # to which the counts of the documents are added

    def options(self) -> StatisticsOptions:
        """Return the options of the n-gram statistics drafter as a plan records them."""
        return StatisticsOptions(table=self.table is not None)

    def drafter_without(self, documents: Sequence[Document]) -> StatisticsDrafter:
        """Return a drafter whose n-gram table excludes answers to the prompts of ``documents``, for a fair evaluation.

        Counts of shipped text are not excluded.
        """
        prompt_keys = {document.prompt_key for document in documents}
        others = [document for document in self.documents if document.prompt_key not in prompt_keys]
        return StatisticsDrafter(self.scorer, None if self.table is None else count_documents(others, self.base))

    def save(self, folder: Path) -> None:
        """Write the n-gram scorer, and the n-gram table if there is one, to ``folder``; existing files are replaced.

        Raises:
            ArtifactError: a file cannot be written.
        """
        self.scorer.save(folder / SCORER_FILE)
        if self.table is not None:
            self.table.save(folder / TABLE_FILE)


def fit_statistics(
    documents: Sequence[Document],
    costs: StepCosts,
    *,
    with_table: bool,
    others: Sequence[Drafter] = (),
    base: BaseTable | None = None,
) -> LearnedStatistics:
    """Fit the n-gram scorer on 9 of 10 documents, predict the speed on the others, and count all documents in a table.

    Args:
        documents: prompts and the target's answers; if there are none, the result has the default scorer and no table.
        costs: step costs in milliseconds, for the predicted speed.
        with_table: whether an n-gram table is made. Otherwise the drafter counts only the text of its request.
        others: model-free drafters that draft in the same tree.
        base: n-gram table to which the counts of the documents are added; None: the table has these counts alone.
    """
    if not documents:
        return LearnedStatistics(NGramScorer.default(with_table=False), None, [])
    held_out = documents[::_HELD_OUT_EVERY]
    rest = [document for i, document in enumerate(documents) if i % _HELD_OUT_EVERY]
    scorer = fit_scorer(rest, with_table=with_table, base=base)
    drafter = StatisticsDrafter(scorer, count_documents(rest, base) if with_table else None)
    drafter.leave_out_below(least_useful_probability([costs]))
    is_predicted = any(len(document.answer) > 1 for document in held_out)
    expected = predict_model_free(DrafterGroup([*others, drafter]), held_out, costs) if is_predicted else []
    table = count_documents(documents, base) if with_table else None
    if table is not None and base is not None:
        own = sum(len(document.answer) for document in documents)
        table = table.with_origin(f"{base.table.origin} and {own:,} tokens that the target wrote")
    return LearnedStatistics(scorer, table, expected, documents, base)
