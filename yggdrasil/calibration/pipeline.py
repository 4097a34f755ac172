"""Calibration from end to end: compile, measure, record, learn, choose, write. Interrupted, it resumes.

Work that is done lies in ``profiles/NAME/<machine>.partial`` until the calibration is complete.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pandas as pd
import torch
import transformers
from transformers import PreTrainedTokenizerBase

import yggdrasil
from yggdrasil.artifacts import (
    atomic_directory,
    current_machine,
    plan_path,
    predictor_directory,
    profile_directory,
    read_csv,
    write_csv,
)  # fmt: skip
from yggdrasil.artifacts.lock import locked
from yggdrasil.calibration.backends import time_backends
from yggdrasil.calibration.choose import Choice, choose, fit_acceptance
from yggdrasil.calibration.counted import Counted, learn_counts
from yggdrasil.calibration.foreseen import foresee
from yggdrasil.calibration.measure import COLUMNS, costs_from, measure_stages, useful_verify_widths
from yggdrasil.calibration.own_text import Document, OwnText, text_file
from yggdrasil.calibration.pair import build_assembly, check_pair, with_threads
from yggdrasil.calibration.record import concatenate, record_document, states_of
from yggdrasil.calibration.settings import CalibrationSettings, PairSource
from yggdrasil.calibration.threads import COLUMNS as thread_columns
from yggdrasil.calibration.threads import best_threads, thread_counts, time_threads
from yggdrasil.calibration.variants import ROUNDS as VARIANT_ROUNDS
from yggdrasil.calibration.variants import time_variants
from yggdrasil.calibration.work import keep_results, open_work, read_or_drop
from yggdrasil.drafters.counts import CountsDrafter
from yggdrasil.drafters.options import CountsOptions, FreeOptions
from yggdrasil.drafters.protocol import Drafter, FreeDrafter, SteppedDrafter, each_of, recyclers, together
from yggdrasil.engine.apart import compile_missing
from yggdrasil.engine.build import Assembly
from yggdrasil.engine.policy import PLAIN_POLICY, FixedPolicy
from yggdrasil.engine.text import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.formats.names import Weights
from yggdrasil.models.kept_tensors import keep_model
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.runner import RUNNERS_UP, ModelRunner
from yggdrasil.models.source import Source
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.report import CalibrationPoint, TrainingReport
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.prompts import Prompt, encode_prompt, read_prompts
from yggdrasil.scheduling.plan import DepthSource, Expectation, ModelRef, Plan, portable_source
from yggdrasil.scheduling.stages import DEFAULT_ORDER, HEAD_FIRST_ORDER
from yggdrasil.tree.objective import StepCosts, TreeShape, least_useful

SAMPLES_VERSION = 1
REPORT_VERSION = 2
FIRST_PASS_DOCUMENTS = 4
FORESEEN = 4  # documents decoded to predict by, where the target has written no text of its own
KEPT_TABLES = ("threads.csv", "backend_samples.csv", "variants.csv")  # measured on the way, for those who look


class Reporter(Protocol):
    """Where progress goes; phases are sequential, fractions run from 0 to 1."""

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase and return where its fraction is reported."""

    def close(self) -> None:
        """All phases are over, until another begins."""


def calibrate(settings: CalibrationSettings, reporter: Reporter) -> Path:
    """Measure, learn and choose; returns the plan's path. Raises YggdrasilError on anything that does not fit."""
    prompts = read_prompts(settings.prompts, chat=settings.chat)
    tokenizer = check_pair(settings.pair)
    texts = _texts(prompts, tokenizer, settings, settings.pair.shapes.max_length)
    folder = profile_directory(settings.root, settings.name, current_machine())
    with locked(folder.with_name(folder.name + ".lock"), f"a calibration named {settings.name}"):
        return _calibrate(settings, tokenizer, texts, reporter)


def _calibrate(
    settings: CalibrationSettings,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[int]],
    reporter: Reporter,
) -> Path:
    assembly = build_assembly(settings.pair)
    work = open_work(settings)  # nothing is written before everything fits
    pair = _choose_threads(assembly, settings.pair, work, reporter)
    if pair != settings.pair:
        assembly = with_threads(assembly, pair)

    compile_missing(assembly, reporter.phase)
    frame = _measure(assembly, tokenizer, texts, settings, work, reporter)
    _time_other_ways(assembly, pair, settings, work, reporter)
    shapes = replace(pair.shapes, verify_widths=useful_verify_widths(frame, pair.shapes))
    costs = costs_from(frame, shapes)
    counted = _count(assembly, pair, tokenizer, settings, costs[0].steps(), work, reporter)
    if pair.drafter is None:
        expected = [] if counted is None else counted.expected
        choice = Choice.without_drafter(
            expected or _foresee(assembly, tokenizer, texts, settings, costs[0].steps(), reporter)
        )
    else:
        traces, acceptance = _record(assembly, tokenizer, texts, settings, work, reporter)
        report = reporter.phase("training the depth predictor and simulating")
        free = _beside(assembly, counted, texts, costs[0].steps())
        choice = choose(traces, acceptance, costs[0].steps(), free, dict(enumerate(texts)))
        report(1.0)

    machine = current_machine()
    predictor_folder = predictor_directory(settings.root, settings.name, machine)
    destination = plan_path(settings.root, settings.name, machine)
    plan = Plan(
        name=settings.name,
        machine=machine,
        versions={
            "yggdrasil": yggdrasil.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        dtype=pair.dtype,
        target=_model_ref(pair.target, pair.target_threads, pair.weights),
        drafters=_drafters_of(pair, counted),
        tokenizer=Source.find(pair.target).tokenizer_fingerprint(),
        shapes=shapes,
        stages=HEAD_FIRST_ORDER if choice.depth_from == "head" else DEFAULT_ORDER,
        objective="latency",
        depth_from=choice.depth_from,
        predictor=Path("../..", predictor_folder.relative_to(settings.root)).as_posix(),
        costs=costs,
        predicted=choice.predicted,
        rejected=choice.rejected,
        device=pair.device,
    )
    _write(settings, plan, destination, choice, counted, frame, work)
    keep_model(assembly.target.loaded, pair.target, pair.weights)
    second = assembly.second
    if isinstance(second, LoadedModel) and pair.drafter is not None:
        keep_model(second, pair.drafter, pair.drafter_weights)
    return destination


def _drafters_of(pair: PairSource, counted: Counted | None) -> list[ModelRef | FreeOptions]:
    """The drafters as the plan names them."""
    model = [] if pair.drafter is None else [_model_ref(pair.drafter, pair.drafter_threads, pair.drafter_weights)]
    learned = [counted.options() if isinstance(each, CountsOptions) and counted else each for each in pair.free]
    return [*model, *learned]


def _write(
    settings: CalibrationSettings,
    plan: Plan,
    destination: Path,
    choice: Choice,
    counted: Counted | None,
    frame: pd.DataFrame,
    work: Path,
) -> None:
    profile = profile_directory(settings.root, settings.name, plan.machine)
    with atomic_directory(profile) as folder:
        keep_results(profile, folder)
        write_csv(folder / "stage_samples.csv", "stage-samples", SAMPLES_VERSION, frame)
        summary = frame.groupby(["context", "width", "depth", "verify_width", "stage"])["ms"]
        described = summary.describe(percentiles=[0.1, 0.9]).drop(columns="std").reset_index()
        for table in (name for name in KEPT_TABLES if (work / name).exists()):
            shutil.copyfile(work / table, folder / table)
        write_csv(folder / "stage_summary.csv", "stage-summary", SAMPLES_VERSION, described)
    with atomic_directory(predictor_directory(settings.root, settings.name, plan.machine)) as folder:
        if choice.learned is not None:
            choice.learned.save(folder)
        if counted is not None:
            counted.save(folder)
        if choice.reports:
            _write_reports(choice.reports, folder)
    plan.save(destination)
    shutil.rmtree(work)


def _write_reports(reports: Mapping[DepthSource, TrainingReport], folder: Path) -> None:
    rows = [{"reads": source, **row} for source, report in reports.items() for row in report.rows()]
    write_csv(folder / "report.csv", "predictor-report", REPORT_VERSION, pd.DataFrame(rows))
    curves = [{"reads": source, **asdict(point)} for source, report in reports.items() for point in report.calibration]
    columns = ["reads", *(each.name for each in fields(CalibrationPoint))]
    write_csv(folder / "calibration.csv", "predictor-calibration", 1, pd.DataFrame(curves, columns=columns))


def _choose_threads(assembly: Assembly, pair: PairSource, work: Path, reporter: Reporter) -> PairSource:
    """The pair with every thread count decided: as asked for, or as measured where 0 was. A GPU's steps use none."""
    if pair.device == "cuda":
        return pair
    file = work / "threads.csv"

    def read(path: Path) -> pd.DataFrame:
        return read_csv(path, "thread-samples", SAMPLES_VERSION, thread_columns)

    wanted = {"target": pair.target_threads, "drafter": pair.drafter_threads}
    runners = {"target": assembly.target, "drafter": assembly.drafter}
    if read_or_drop(file, read) is None:
        report = reporter.phase("measuring thread counts")
        counts = thread_counts(current_machine().cores)
        frames = [
            time_threads(runner.loaded, name, counts)
            for name, runner in runners.items()
            if runner is not None and not wanted[name]
        ]
        empty = pd.DataFrame(columns=list(thread_columns))
        write_csv(file, "thread-samples", SAMPLES_VERSION, pd.concat(frames) if frames else empty)
        report(1.0)
    samples = read(file)
    best = {str(name): best_threads(group) for name, group in samples.groupby("model")}
    chosen = {name: count or best.get(name, 1) for name, count in wanted.items()}
    return replace(pair, target_threads=chosen["target"], drafter_threads=chosen["drafter"])


def _time_other_ways(
    assembly: Assembly, pair: PairSource, settings: CalibrationSettings, work: Path, reporter: Reporter
) -> None:
    """Note what steps would cost made otherwise; a GPU's are compared by scripts/check_cuda.py."""
    context = min(settings.effort.contexts[0], assembly.engine.max_length // 2)
    backends, variants = work / "backend_samples.csv", work / "variants.csv"
    if pair.device == "cpu" and settings.effort.backends and not _is_kept(backends, "backend-samples"):
        samples = time_backends(assembly, context, reporter.phase("timing eager steps beside packages"))
        write_csv(backends, "backend-samples", SAMPLES_VERSION, samples)
    if settings.variants and not _is_kept(variants, "variants"):
        table = time_variants(pair, context, VARIANT_ROUNDS, reporter.phase("timing other ways to build steps"))
        write_csv(variants, "variants", SAMPLES_VERSION, table)


def _is_kept(table: Path, kind: str) -> bool:
    return read_or_drop(table, partial(read_csv, kind=kind, version=SAMPLES_VERSION)) is not None


def _texts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, settings: CalibrationSettings, max_length: int
) -> list[list[int]]:
    effort = settings.effort
    room = min(effort.prompt_tokens, max_length - effort.tokens - settings.pair.shapes.max_depth - 1)
    texts = [encode_prompt(tokenizer, prompt)[-room:] for prompt in prompts]
    texts = [text for text in texts if text][: effort.documents]
    if len(texts) < 4:
        raise YggdrasilError(f"{settings.prompts} has {len(texts)} usable prompts; calibration needs at least 4")
    return texts


def _measure(
    assembly: Assembly,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[int]],
    settings: CalibrationSettings,
    work: Path,
    reporter: Reporter,
) -> pd.DataFrame:
    stream = [token for text in texts for token in text]
    frames = []
    for context in settings.effort.contexts_within(assembly.engine.max_length):
        file = work / f"stages-{context}.csv"
        if read_or_drop(file, _read_stages) is None:
            report = reporter.phase(f"measuring stages at context {context}")
            text = (stream * (context // len(stream) + 1))[:context]
            frame = measure_stages(assembly, lambda: open_ended(tokenizer), text, settings.effort.samples, report)
            write_csv(file, "stage-samples", SAMPLES_VERSION, frame)
        frames.append(_read_stages(file))
    return pd.concat(frames, ignore_index=True)


def _read_stages(file: Path) -> pd.DataFrame:
    return read_csv(file, "stage-samples", SAMPLES_VERSION, COLUMNS)


def _count(
    assembly: Assembly,
    pair: PairSource,
    tokenizer: PreTrainedTokenizerBase,
    settings: CalibrationSettings,
    costs: StepCosts,
    work: Path,
    reporter: Reporter,
) -> Counted | None:
    """Let the target write text, and the drafter that counts learn from it; None where there is none."""
    if pair.counts is None:
        return None
    everyone = each_of(assembly.engine.free)
    (drafter,) = (each for each in everyone if isinstance(each, CountsDrafter))
    others = [each for each in everyone if each is not drafter]
    if pair.drafter is not None and not pair.counts.table:  # the text alone beside a model: the usual belief will do
        return learn_counts([], costs, with_table=False)._replace(recycles=pair.counts.recycling)
    source = Source.find(pair.target)
    file = text_file(f"{source.fingerprint()}-{pair.weights}")
    prompts = [encode_prompt(tokenizer, prompt) for prompt in read_prompts(settings.prompts, chat=settings.chat)]
    writer = OwnText(assembly.target.loaded, tokenizer, prompts, file)
    documents = writer.write(settings.own_text, work / "own-text.json", reporter.phase)
    recycled = partial(_runners_up, assembly.target) if pair.counts.recycling else None
    counted = learn_counts(documents, costs, with_table=pair.counts.table, others=others, runners_up=recycled)
    drafter.learn(counted.belief, counted.table)
    return counted


def _beside(
    assembly: Assembly, counted: Counted | None, texts: Sequence[Sequence[int]], costs: StepCosts
) -> FreeDrafter | None:
    """What guesses beside the drafter, without knowing how ``texts`` go on."""
    others = [each for each in each_of(assembly.engine.free) if not isinstance(each, CountsDrafter)]
    if counted is None:
        return together(others)
    counts = counted.knowing_nothing_of(texts)
    counts.leave_out_below(least_useful([costs]))
    return together([*others, counts])


def _runners_up(runner: ModelRunner, document: Document) -> torch.Tensor:
    """The target's runners-up before each token of the answer, [len(answer), K]."""
    _, layers = states_of(runner, [*document.prompt, *document.answer[:-1]])
    return layers[RUNNERS_UP][len(document.prompt) - 1 :]


def _foresee(
    assembly: Assembly,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[int]],
    settings: CalibrationSettings,
    costs: StepCosts,
    reporter: Reporter,
) -> list[Expectation]:
    """What to expect by a few of ``texts``, where the target has written nothing else."""
    if assembly.engine.free is None:
        return foresee(None, [], costs)
    report, documents = reporter.phase("decoding a few prompts to predict by"), []
    for number, text in enumerate(texts[:FORESEEN], start=1):
        stream = open_ended(tokenizer, settings.effort.tokens)
        for _ in assembly.engine.decode(text, stream, PLAIN_POLICY, Trace()):
            pass
        documents.append(Document(list(text), stream.tokens))
        report(number / len(texts[:FORESEEN]))
    recycled = partial(_runners_up, assembly.target) if recyclers(assembly.engine.free) else None
    return foresee(assembly.engine.free, documents, costs, recycled)


def _record(
    assembly: Assembly,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[int]],
    settings: CalibrationSettings,
    work: Path,
    reporter: Reporter,
) -> tuple[TraceSet, AcceptanceCalibration]:
    """Traces of all documents, grown with an acceptance calibration fitted on the first few."""
    drafter = assembly.engine.drafter
    assert isinstance(drafter, SteppedDrafter)
    report = reporter.phase(f"recording acceptance on {len(texts)} documents")
    first = [
        _document(assembly, drafter, tokenizer, settings, texts, i, work / f"first-{i}.safetensors")
        for i in range(min(FIRST_PASS_DOCUMENTS, len(texts) // 2))
    ]
    acceptance = fit_acceptance(concatenate(first))
    drafter.knots.copy_(torch.from_numpy(acceptance.knots.copy()))
    parts = []
    for i in range(len(texts)):
        parts.append(_document(assembly, drafter, tokenizer, settings, texts, i, work / f"traces-{i}.safetensors"))
        report((i + 1) / len(texts))
    return concatenate(parts), acceptance


def _document(
    assembly: Assembly,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    settings: CalibrationSettings,
    texts: Sequence[Sequence[int]],
    index: int,
    file: Path,
) -> TraceSet:
    kept = read_or_drop(file, TraceSet.load)
    if kept is None:
        shapes = settings.pair.shapes
        policy = FixedPolicy(TreeShape(shapes.widest_draft, min(4, shapes.max_depth), min(8, shapes.verify_widths[-1])))
        stream = open_ended(tokenizer, settings.effort.tokens + shapes.max_depth)
        for _ in assembly.engine.decode(texts[index], stream, policy, Trace()):
            pass
        kept = record_document(assembly, drafter, texts[index], stream.tokens, index)
        kept.save(file)
    return kept


def open_ended(tokenizer: PreTrainedTokenizerBase, max_new_tokens: int = 1 << 30) -> TextStream:
    """A stream that no end-of-text token stops."""
    return TextStream(tokenizer, frozenset(), max_new_tokens, ())


def _model_ref(source: str, threads: int, weights: Weights) -> ModelRef:
    return ModelRef(portable_source(source), Source.find(source).fingerprint(), threads, weights)
