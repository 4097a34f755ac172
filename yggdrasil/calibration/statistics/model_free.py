"""Calibrates model-free drafters: fits them on the target's own text and predicts their speed."""

from collections.abc import Sequence

from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.documents import open_ended_stream
from yggdrasil.calibration.job import Job
from yggdrasil.calibration.own_text import Document, OwnText, read_documents, text_file
from yggdrasil.calibration.statistics.base_table import BaseTable
from yggdrasil.calibration.statistics.learning import LearnedStatistics, fit_statistics
from yggdrasil.calibration.statistics.prediction import predict_model_free
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.protocol import Drafter, DrafterGroup, group_of
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.engine.trace import Trace
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.policy.objective import least_useful_probability
from yggdrasil.prompts import encode_prompts, read_prompts
from yggdrasil.scheduling.plan import Expectation

OWN_TEXT = "own-text.json"  # records the seconds spent on generating text
PREDICTION_DOCUMENTS = 4  # documents decoded for the prediction if there is no text of the target


def generate_and_fit(job: Job, costs: StepCosts, base: BaseTable | None) -> LearnedStatistics | None:
    """Generate text of the target and fit the n-gram statistics on it; None if the pair uses no n-gram statistics.

    The fitted scorer and table are also set in the drafter of ``job.assembly``. A pair with a draft model or head and
    no n-gram table generates no text; the result then has the default scorer and no table.

    Args:
        costs: step costs in milliseconds, for the predicted speed.
        base: n-gram table to which the counts of the text are added. With None the table has these counts alone.
    """
    pair = job.pair
    if pair.counts is None:
        return None
    everyone = _all_of(job)
    (drafter,) = (each for each in everyone if isinstance(each, StatisticsDrafter))
    others = [each for each in everyone if each is not drafter]
    if not _writes(pair):  # no table and a model drafts: use the default scorer
        return fit_statistics([], costs, with_table=False)
    documents = own_text(job)
    report = job.reporter.phase("fitting the n-gram scorer")
    counted = fit_statistics(documents, costs, with_table=pair.counts.table, others=others, base=base)
    drafter.set_scorer(counted.scorer, counted.table)
    report(1.0)
    return counted


def own_text(job: Job) -> list[Document]:
    """Return all text that the target has generated in this and earlier calibrations, as prompts with answers.

    If the pair uses n-gram statistics, and has an n-gram table or neither draft model nor head, the target first
    generates more text, until ``settings.text_budget`` (seconds of this calibration, or tokens of all the text) is used
    up. Otherwise only existing text is read.
    """
    target = job.assembly.target.loaded
    file = text_file(Source.find(job.pair.target).fingerprint(), job.pair.weights)
    if not _writes(job.pair):
        return read_documents(file, target.vocab_size)
    found = read_prompts(job.settings.prompts, chat=job.settings.chat)
    prompts = encode_prompts(job.tokenizer, found)
    writer = OwnText(target, job.tokenizer, prompts, file)
    return writer.write(job.settings.text_budget, job.work / OWN_TEXT, job.reporter.phase)


def _writes(pair: PairSource) -> bool:
    return pair.counts is not None and (pair.drafter is None or pair.counts.table)


def model_free_without(
    job: Job, counted: LearnedStatistics | None, documents: Sequence[Document], costs: StepCosts
) -> DrafterGroup | None:
    """Return the model-free drafters of a calibration for an evaluation on ``documents``; None if it has none.

    Their n-gram table does not count answers to the prompts of ``documents``.

    Args:
        counted: the n-gram statistics of the calibration; None without them.
        costs: step costs in milliseconds. Candidates too improbable to save time at these costs are not drafted.
    """
    others = [each for each in _all_of(job) if not isinstance(each, StatisticsDrafter)]
    if counted is None:
        return group_of(others)
    counts = counted.drafter_without(documents)
    counts.leave_out_below(least_useful_probability([costs]))
    return DrafterGroup([*others, counts])


def predict_from_prompts(job: Job, costs: StepCosts) -> list[Expectation]:
    """Decode the first ``PREDICTION_DOCUMENTS`` prompts of a calibration plainly, and predict the speed on them.

    This is for a target that has generated no text. The result is the expected speeds of the run-time policy, of the
    best fixed verify width (if there is one above 1) and of plain decoding, in this order. Without model-free drafters
    nothing is decoded, and only the speed of plain decoding is returned.

    Args:
        costs: step costs in milliseconds.
    """
    model_free = job.assembly.engine.model_free
    if model_free is None:
        return predict_model_free(None, [], costs)
    report, documents = job.reporter.phase("decoding a few prompts for the prediction"), []
    for number, text in enumerate(job.texts[:PREDICTION_DOCUMENTS], start=1):
        stream = open_ended_stream(job.tokenizer, job.settings.tokens)
        for _ in job.assembly.engine.decode(text, stream, PLAIN_POLICY, Trace()):
            pass
        documents.append(Document(list(text), stream.tokens))
        report(number / len(job.texts[:PREDICTION_DOCUMENTS]))
    return predict_model_free(model_free, documents, costs)


def _all_of(job: Job) -> list[Drafter]:
    model_free = job.assembly.engine.model_free
    return [] if model_free is None else model_free.drafters
