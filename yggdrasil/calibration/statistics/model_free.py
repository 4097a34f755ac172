"""Model-free drafters in a calibration: what they learn from the target's own text, and what they will give."""

from collections.abc import Sequence
from functools import partial

import torch

from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.documents import open_ended
from yggdrasil.calibration.job import Job
from yggdrasil.calibration.own_text import Document, OwnText, read_documents, text_file
from yggdrasil.calibration.record import states_of
from yggdrasil.calibration.statistics.learning import LearnedStatistics, learn_counts
from yggdrasil.calibration.statistics.prediction import predict_model_free
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.protocol import Drafter, DrafterGroup, group_of
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.engine.trace import Trace
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.policy.objective import least_useful_probability
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.runtime.forward import RUNNERS_UP
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.scheduling.plan import Expectation

OWN_TEXT = "own-text.json"  # how long the target has written already
PREDICTION_DOCUMENTS = 4  # documents decoded to predict by, where the target has written no text of its own


def count_text(job: Job, costs: StepCosts) -> LearnedStatistics | None:
    """Let the target write text, and the drafter that counts learn from it; None where there is none."""
    pair = job.pair
    if pair.counts is None:
        return None
    everyone = _all_of(job)
    (drafter,) = (each for each in everyone if isinstance(each, StatisticsDrafter))
    others = [each for each in everyone if each is not drafter]
    if not _writes(pair):  # the text alone beside a model: the default scorer serves
        return learn_counts([], costs, with_table=False)._replace(recycles=pair.counts.recycling)
    documents = own_text(job)
    recycled = partial(_runners_up, job.assembly.target) if pair.counts.recycling else None
    report = job.reporter.phase("fitting the n-gram scorer")
    counted = learn_counts(documents, costs, with_table=pair.counts.table, others=others, runners_up=recycled)
    drafter.learn(counted.scorer, counted.table)
    report(1.0)
    return counted


def own_text(job: Job) -> list[Document]:
    """The target's own text: what there is, and where a table is wanted or counts alone guess, what it writes now."""
    target = job.assembly.target.loaded
    file = text_file(Source.find(job.pair.target).fingerprint(), job.pair.weights)
    if not _writes(job.pair):
        return read_documents(file, target.vocab_size)
    asked = read_prompts(job.settings.prompts, chat=job.settings.chat)
    prompts = [encode_prompt(job.tokenizer, prompt) for prompt in asked]
    writer = OwnText(target, job.tokenizer, prompts, file)
    return writer.write(job.settings.own_text, job.work / OWN_TEXT, job.reporter.phase)


def _writes(pair: PairSource) -> bool:
    return pair.counts is not None and (pair.drafter is None or pair.counts.table)


def guesses_beside(
    job: Job, counted: LearnedStatistics | None, documents: Sequence[Document], costs: StepCosts
) -> DrafterGroup | None:
    """The model-free drafters beside the drafter, learned without the ``documents`` that both are evaluated on."""
    others = [each for each in _all_of(job) if not isinstance(each, StatisticsDrafter)]
    if counted is None:
        return group_of(others)
    counts = counted.knowing_nothing_of(documents)
    counts.leave_out_below(least_useful_probability([costs]))
    return DrafterGroup([*others, counts])


def _runners_up(runner: ModelRunner, document: Document) -> torch.Tensor:
    """The target's runners-up before each token of the answer, [len(answer), K]."""
    _, layers = states_of(runner, [*document.prompt, *document.answer[:-1]])
    return layers[RUNNERS_UP][len(document.prompt) - 1 :]


def predict_some(job: Job, costs: StepCosts) -> list[Expectation]:
    """What to expect by a few of ``texts``, where the target has written nothing else."""
    model_free = job.assembly.engine.model_free
    if model_free is None:
        return predict_model_free(None, [], costs)
    report, documents = job.reporter.phase("decoding a few prompts to predict by"), []
    for number, text in enumerate(job.texts[:PREDICTION_DOCUMENTS], start=1):
        stream = open_ended(job.tokenizer, job.settings.tokens)
        for _ in job.assembly.engine.decode(text, stream, PLAIN_POLICY, Trace()):
            pass
        documents.append(Document(list(text), stream.tokens))
        report(number / len(job.texts[:PREDICTION_DOCUMENTS]))
    recycled = (
        partial(_runners_up, job.assembly.target) if model_free.capabilities.read_runners_up is not None else None
    )
    return predict_model_free(model_free, documents, costs, recycled)


def _all_of(job: Job) -> list[Drafter]:
    model_free = job.assembly.engine.model_free
    return [] if model_free is None else model_free.drafters
