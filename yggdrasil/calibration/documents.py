"""Prepares the prompts of a calibration, and records the drafter's trees on the target's answers."""

from collections.abc import Sequence
from pathlib import Path

import torch

from yggdrasil.calibration.calibration_settings import CalibrationSettings
from yggdrasil.calibration.choose import fit_acceptance
from yggdrasil.calibration.job import Job
from yggdrasil.calibration.record import concatenate, record_document
from yggdrasil.calibration.work_folder import read_or_drop
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.drafters.protocol import Drafter
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.prompts import Prompt, encode_prompts
from yggdrasil.tree.shape import TreeShape

FIRST_PASS_DOCUMENTS = 4
LEAST_LENGTH = 56  # tokens of context in addition to the deepest tree: for a prompt and some iterations


def usable_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, settings: CalibrationSettings) -> list[list[int]]:
    """Return the token ids of the prompts to calibrate on, in their order, at most ``settings.effort.documents``.

    A prompt is cut to its last ``settings.prompt_tokens`` tokens, and empty prompts are left out.

    Raises:
        YggdrasilError: there are fewer than four usable prompts, or ``max_length`` is too small.
    """
    if (length := settings.pair.shapes.max_length) < (least := LEAST_LENGTH + settings.pair.shapes.max_depth):
        raise YggdrasilError(f"--max-length {length} leaves no room to calibrate in; give at least {least}")
    texts = [text[-settings.prompt_tokens :] for text in encode_prompts(tokenizer, prompts)]
    texts = [text for text in texts if text][: settings.effort.documents]
    if len(texts) < 4:
        raise YggdrasilError(f"{settings.prompts} has {len(texts)} usable prompts; calibration needs at least 4")
    return texts


def record_all(job: Job) -> tuple[TraceSet, AcceptanceCalibration]:
    """Let the target answer the prompts of ``job``, and record the drafter's trees at every position of the answers.

    ``job`` must have a draft model or head. The first pass records the first four documents (a prompt with its answer),
    or half of fewer than eight, and fits the acceptance calibration to them: the map from the drafter's probability of
    a token to the share of accepted tokens. This map is written to the drafter's steps. The second pass records all
    documents, with trees grown by the map. Documents that an interrupted run recorded are loaded from ``job.work``.

    Returns:
        (traces of the second pass, the acceptance calibration)
    """
    drafter = job.assembly.engine.drafter
    assert drafter is not None
    assert drafter.capabilities.steps is not None
    report = job.reporter.phase(f"recording acceptance on {len(job.texts)} documents")
    num_first = min(FIRST_PASS_DOCUMENTS, len(job.texts) // 2)
    total = num_first + len(job.texts)

    def recorded(name: str, num_documents: int, before: int) -> TraceSet:
        parts = []
        for i in range(num_documents):
            parts.append(_document(job, drafter, i, job.work / f"{name}-{i}.safetensors"))
            report((before + i + 1) / total)
        return concatenate(parts)

    acceptance = fit_acceptance(recorded("first", num_first, 0))
    drafter.capabilities.steps.knots.copy_(torch.from_numpy(acceptance.knots.copy()))
    return recorded("traces", len(job.texts), num_first), acceptance


def _document(job: Job, drafter: Drafter, index: int, file: Path) -> TraceSet:
    kept = read_or_drop(file, TraceSet.load)
    if kept is None:
        shapes = job.pair.shapes
        policy = FixedPolicy(TreeShape(shapes.widest_draft, min(4, shapes.max_depth), min(8, shapes.verify_widths[-1])))
        stream = open_ended_stream(job.tokenizer, job.settings.tokens + shapes.max_depth)
        for _ in job.assembly.engine.decode(job.texts[index], stream, policy, Trace()):
            pass
        kept = record_document(job.assembly, drafter, job.texts[index], stream.tokens, index)
        kept.save(file)
    return kept


def open_ended_stream(tokenizer: Tokenizer, max_new_tokens: int = 1 << 30) -> TextStream:
    """Return a new text stream that ends after ``max_new_tokens`` (by default: never), not at an end-of-text token."""
    return TextStream(tokenizer, frozenset(), max_new_tokens, ())
