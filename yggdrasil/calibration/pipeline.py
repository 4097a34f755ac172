"""Calibration end to end: compile, measure, record, fit, choose, write. An interrupted calibration resumes.

Intermediate results are in ``profiles/NAME/<machine>.partial`` until the calibration is complete.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from yggdrasil.artifacts import (
    current_machine,
    plan_path,
    predictor_directory,
    profile_directory,
    read_csv,
    write_csv,
)  # fmt: skip
from yggdrasil.artifacts.lock import locked
from yggdrasil.calibration.calibration_settings import CalibrationSettings, PairSource, versions
from yggdrasil.calibration.choose import Choice, choose
from yggdrasil.calibration.documents import open_ended_stream, record_all, usable_prompts
from yggdrasil.calibration.draft_vocabulary import restrict_vocabulary
from yggdrasil.calibration.job import Job
from yggdrasil.calibration.measurement.costs import costs_from, useful_verify_widths
from yggdrasil.calibration.measurement.iterations import (
    measure_iterations,
    measure_reading,
    measured_policies,
    on_device_clock,
    prefill_text,
)
from yggdrasil.calibration.measurement.steps import COLUMNS, Sample, measure_steps
from yggdrasil.calibration.measurement.threads import COLUMNS as thread_columns
from yggdrasil.calibration.measurement.threads import best_threads, thread_counts, time_threads
from yggdrasil.calibration.pair import build_assembly, check_pair, with_threads
from yggdrasil.calibration.replay import recorded_documents
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.calibration.results import SAMPLES_VERSION, write_results
from yggdrasil.calibration.statistics.base_table import base_table
from yggdrasil.calibration.statistics.learning import LearnedStatistics
from yggdrasil.calibration.statistics.model_free import (
    OWN_TEXT,
    generate_and_fit,
    model_free_without,
    predict_from_prompts,
)
from yggdrasil.calibration.work_folder import open_part, open_work, read_or_drop
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.drafters.model_free_options import ModelFreeOptions, StatisticsOptions
from yggdrasil.engine.assembly import Assembly
from yggdrasil.errors import ArtifactError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.profiling.timers import timer_for
from yggdrasil.prompts import read_prompts
from yggdrasil.runtime.kept_tensors import keep_model
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.scheduling.plan import Costs, LeftOut, ModelRef, Plan, Shapes
from yggdrasil.scheduling.stages import DEFAULT_ORDER, HEAD_FIRST_ORDER

STEP_TURNS = 12  # turns in which every step is timed
ITERATION_TURNS = 4  # turns in which every kind of iteration is timed


def calibrate(settings: CalibrationSettings, reporter: Reporter) -> Path:
    """Calibrate a target and its drafter, write profile, predictor and plan, and return the path of the plan.

    If the drafter does not pay off, the target is calibrated without it, unless ``settings.keeps_drafter``.

    Raises:
        YggdrasilError: models, prompts or settings are unusable, or a file cannot be read or written.
    """
    prompts = read_prompts(settings.prompts, chat=settings.chat)
    tokenizer = check_pair(settings.pair)
    texts = usable_prompts(prompts, tokenizer, settings)
    folder = profile_directory(settings.root, settings.name, current_machine())
    with locked(folder.with_name(folder.name + ".lock"), f"a calibration named {settings.name}"):
        assembly = build_assembly(settings.pair)
        work = open_work(settings)  # nothing is written before the checks pass
        made = _calibrate(settings, assembly, tokenizer, texts, work, reporter)
        if isinstance(made, LeftOut):
            del assembly  # frees memory; the target is loaded again
            reporter.phase(f"leaving out {made.describe()}")(1.0)
            alone = replace(settings, pair=settings.pair.without_drafter())
            part = open_part(work, "without-drafter", [OWN_TEXT])
            made = _calibrate(alone, build_assembly(alone.pair), tokenizer, texts, part, reporter, left_out=made)
        assert isinstance(made, Path), "without a drafter nothing is left out"
        shutil.rmtree(work)
        return made


def _calibrate(
    settings: CalibrationSettings,
    assembly: Assembly,
    tokenizer: Tokenizer,
    texts: Sequence[Sequence[int]],
    work: Path,
    reporter: Reporter,
    left_out: LeftOut | None = None,
) -> Path | LeftOut:
    """Calibrate, write the plan and return its path; return the drafter instead if it does not pay off.

    With ``settings.keeps_drafter`` the plan is written even if the drafter does not pay off.
    """
    base = base_table(settings, assembly.target.loaded, reporter)
    pair = _choose_threads(assembly, settings.pair, work, reporter)
    if pair != settings.pair:
        assembly = with_threads(assembly, pair)

    job = restrict_vocabulary(Job(settings, pair, assembly, tokenizer, texts, work, reporter))
    pair = job.pair
    job.assembly.complete(reporter.phase)
    samples = _measure(job)
    shapes = replace(pair.shapes, verify_widths=useful_verify_widths(samples, pair.shapes))
    costs = costs_from(samples, shapes)
    counted = generate_and_fit(job, costs[0].steps(), base)
    choice = _choose(job, counted, costs[0].steps())
    if choice.gain is not None and not (choice.gain.pays or settings.keeps_drafter):
        (drafter,) = pair.drafter_refs()
        return LeftOut(drafter, choice.gain.drafting, choice.gain.without)

    plan = _plan(job, shapes, costs, counted, choice, left_out)
    destination = plan_path(settings.root, plan.name, plan.machine)
    write_results(settings, plan, destination, choice, counted, pair.vocabulary, samples, work)
    keep_model(job.assembly.target.loaded, pair.target, pair.weights)
    second = job.assembly.second
    if isinstance(second, LoadedModel) and pair.drafter is not None:
        keep_model(second, pair.drafter, pair.drafter_weights)
    return destination


def _choose(job: Job, counted: LearnedStatistics | None, costs: StepCosts) -> Choice:
    """Return the fitted tables, the chosen depth source and the expected speeds, simulated on the target's text."""
    if job.pair.drafter is None:
        return Choice.without_drafter((counted.expected if counted else []) or predict_from_prompts(job, costs))
    traces, acceptance = record_all(job)
    report = job.reporter.phase("training the depth predictor and simulating")
    prompts = dict(enumerate(job.texts))
    model_free = model_free_without(job, counted, recorded_documents(traces, prompts), costs)
    choice = choose(traces, acceptance, costs, model_free, prompts)
    report(1.0)
    return choice


def _plan(
    job: Job,
    shapes: Shapes,
    costs: list[Costs],
    counted: LearnedStatistics | None,
    choice: Choice,
    left_out: LeftOut | None,
) -> Plan:
    settings, pair, machine = job.settings, job.pair, current_machine()
    predictor = predictor_directory(settings.root, settings.name, machine).relative_to(settings.root)
    return Plan(
        name=settings.name,
        machine=machine,
        versions=versions(),
        dtype=pair.dtype,
        target=pair.target_ref(),
        drafters=_drafters_of(pair, counted),
        tokenizer=Source.find(pair.target).tokenizer_fingerprint(),
        shapes=shapes,
        stages=HEAD_FIRST_ORDER if choice.depth_from == "head" else DEFAULT_ORDER,
        objective="latency",
        depth_from=choice.depth_from,
        predictor=Path("../..", predictor).as_posix(),
        costs=costs,
        predicted=choice.predicted,
        rejected=choice.rejected,
        device=pair.device,
        left_out=left_out,
        draft_vocabulary=None if pair.vocabulary is None else len(pair.vocabulary.tokens),
    )


def _drafters_of(pair: PairSource, counted: LearnedStatistics | None) -> list[ModelRef | ModelFreeOptions]:
    """Return the drafters as the plan records them."""
    learned = [
        counted.options() if isinstance(each, StatisticsOptions) and counted else each for each in pair.model_free
    ]
    return [*pair.drafter_refs(), *learned]


def _choose_threads(assembly: Assembly, pair: PairSource, work: Path, reporter: Reporter) -> PairSource:
    """Return ``pair`` with its thread counts set; a count of 0 is replaced by the measured best. No change on a GPU."""
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


def _measure(job: Job) -> list[Sample]:
    """Return the samples of every context, from disk if an interrupted run measured them."""
    stream = [token for text in job.texts for token in text]
    samples: list[Sample] = []
    for context in job.settings.effort.contexts_within(job.assembly.engine.max_length):
        file = job.work / f"stages-{context}.csv"
        if (known := read_or_drop(file, _read_samples)) is None:
            report = job.reporter.phase(f"timing steps at context {context}")
            known = _samples_at(job, (stream * (context // len(stream) + 1))[:context], report)
            write_csv(file, "stage-samples", SAMPLES_VERSION, pd.DataFrame(known, columns=list(COLUMNS)))
        samples += known
    return samples


def _samples_at(job: Job, text: Sequence[int], report: Callable[[float], None]) -> list[Sample]:
    """Time the steps, then real iterations and the drafter's reading, with the tokens ``text`` in the caches."""
    assembly, stream = job.assembly, partial(open_ended_stream, job.tokenizer)
    timer, policies = timer_for(assembly.target.loaded.device), measured_policies(assembly)
    each = -(-job.settings.effort.samples // ITERATION_TURNS)
    samples = measure_steps(assembly, len(text), STEP_TURNS, lambda part: report(0.4 * part), timer)
    with on_device_clock(assembly):
        prefill_text(assembly, stream, text, lambda part: report(0.4 + 0.2 * part))
        samples += measure_iterations(
            assembly, stream, text, policies, each, ITERATION_TURNS, lambda part: report(0.6 + 0.2 * part)
        )
        samples += measure_reading(assembly, stream, text, lambda part: report(0.8 + 0.2 * part))
    assembly.forget()
    return samples


def _read_samples(file: Path) -> list[Sample]:
    frame = read_csv(file, "stage-samples", SAMPLES_VERSION, COLUMNS)
    drafted = set(frame.loc[frame["width"] > 0, "stage"])
    if "pass" not in frame["stage"].values or (drafted and "grow" not in drafted):
        raise ArtifactError(f"{file} lacks times of steps: an earlier version wrote it")
    return [Sample(*row) for row in frame.itertuples(index=False)]
