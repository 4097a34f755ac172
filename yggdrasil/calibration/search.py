"""Searches the best schedule of a calibrated pair: measures stage costs, ranks the grid, measures the best plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from yggdrasil.artifacts import current_machine, plan_path, read_csv, resolve_plan, shown, write_csv
from yggdrasil.artifacts.names import profile_of_plan, root_of
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.documents import open_ended_stream
from yggdrasil.calibration.measurement.costs import rounded
from yggdrasil.calibration.measurement.iterations import on_device_clock
from yggdrasil.calibration.measurement.schedules import (
    PLAIN,
    MeasuredPlan,
    measure_plans,
    measure_stage_costs,
    measured_schedules,
    summarise_plans,
)
from yggdrasil.calibration.pair import build_assembly
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.engine.assembly import Assembly
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import lower_envelope
from yggdrasil.policy.objective import Objective
from yggdrasil.predictor.bundle import Learned
from yggdrasil.prompts import encode_prompts, read_prompts, spread_over
from yggdrasil.scheduling.costs import COLUMNS, StageCosts
from yggdrasil.scheduling.plan import Costs, ModelRef, Plan, Searched, SearchResult, check_plan
from yggdrasil.scheduling.search import AcceptedLengths, Candidate, Space, predict_ms, search
from yggdrasil.scheduling.stages import Schedule, named_variants
from yggdrasil.scheduling.timeline import ExecutorKind
from yggdrasil.tree.shape import TreeShape

SAMPLES_FILE, MEASURED_FILE = "schedule_samples.csv", "schedule_measured.csv"
SAMPLES_VERSION, VERSION = 2, 1
_STAGES_SHARE, _PLANS_SHARE = 0.4, 0.5  # shares of the remaining time: for stages, then for all plans


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. Without ``prompts`` nothing is measured, and the profile must have all stage costs."""

    profile: str  # name or file of the calibrated plan
    prompts: Path | None
    objective: Objective = "latency"
    save_as: str | None = None  # name of the plan to write; None: the profile's
    top: int = 10  # number of best predictions to measure
    limit: int = 8  # prompts decoded, spread over the file
    tokens: int = 48  # generated after each prompt
    context: int = 128  # a longer prompt is cut to so many last tokens
    rounds: int = 5  # times that every plan decodes every prompt
    final_rounds: int = 15  # further times for the fastest plan, the named plans and plain decoding
    minutes: int = 30  # limit of measuring; each tree shape and each plan is measured at least once
    measure_again: bool = False  # whether stages are measured even if the profile has their costs
    chat: bool = False  # whether plain prompts become a user's turn in the chat template
    force_machine: bool = False  # whether a plan of another machine may be used


class _Subject(NamedTuple):
    """The plan whose schedule is searched, its folders, and its acceptance tables."""

    plan: Plan
    root: Path
    profile: Path
    predictor: Path
    lengths: AcceptedLengths
    knots: torch.Tensor
    reads_states: bool  # whether the plan's drafter is a head that reads the target's hidden states

    @property
    def is_captured(self) -> bool:
        """Whether the plan's steps are captured CUDA graphs."""
        return self.plan.device == "cuda"

    @property
    def backend(self) -> str:
        """Name of the step builder in search results: "cudagraph" or "inductor"."""
        return "cudagraph" if self.is_captured else "inductor"

    @property
    def executor(self) -> ExecutorKind:
        """Which stages share a resource: "captured" on a GPU, else "in-order"."""
        return "captured" if self.is_captured else "in-order"

    @property
    def named(self) -> Mapping[str, Mapping[str, str]]:
        """The paper's plans that the drafter and the device support, by name: stage -> variant."""
        return named_variants(reads_states=self.reads_states, is_captured=self.is_captured)


class _Bench(NamedTuple):
    """The models with the steps of every schedule, the prompts as token ids, and the time limit."""

    assembly: Assembly
    tokenizer: Tokenizer
    texts: list[list[int]]
    end: float  # seconds of ``perf_counter`` at which measuring ends

    @property
    def seconds_left(self) -> float:
        """Seconds until measuring ends, at least 0."""
        return max(self.end - perf_counter(), 0.0)


def search_schedules(settings: SearchSettings, reporter: Reporter) -> Path:
    """Search the best schedule and tree shape of a calibrated pair, write a plan with it, and return the plan's path.

    Samples and measurements are written to the profile. Equal profiles give equal rankings. The plan that is searched
    is replaced, unless ``settings.save_as`` is another name.

    Raises:
        YggdrasilError: the plan has no draft model or head, stage costs or prompts are missing, a file of the
            calibration is missing or damaged, or the result cannot be written.
    """
    subject = _open(settings)
    bench = _set_up(subject, settings, reporter) if settings.prompts is not None else None
    costs = StageCosts.from_samples(
        _stage_samples(subject, settings, bench, reporter), shown(subject.profile / SAMPLES_FILE)
    )
    reads_head = subject.plan.depth_from == "head"
    space = Space.of(subject.lengths, subject.executor, reads_head=reads_head, reads_states=subject.reads_states)
    best = search(space, costs, subject.lengths, settings.objective, keep=settings.top)
    entries = [_entry(f"top {i}", candidate, subject) for i, candidate in enumerate(best, start=1)]
    entries += _named_entries(best[0], costs, subject, entries)
    if bench is not None:
        entries = _measured(entries, bench, costs.plain_ms, subject, settings, reporter)
    chosen = _choose(entries, settings.objective)
    calibrated = list(subject.plan.costs) if subject.plan.search is None else subject.plan.search.calibrated
    result = SearchResult(settings.objective, chosen.name, entries, calibrated)
    plan = replace(
        subject.plan,
        name=settings.save_as or subject.plan.name,
        stages=chosen.stages,
        objective=settings.objective,
        costs=[_adapted(entry, chosen, costs, subject.lengths) for entry in calibrated],
        search=result,
    )
    destination = plan_path(subject.root, plan.name, subject.plan.machine)
    plan.save(destination)
    return destination


def _open(settings: SearchSettings) -> _Subject:
    machine = current_machine()
    path = resolve_plan(settings.profile, machine, force=settings.force_machine)
    plan = Plan.load(path)
    check_plan(plan, machine, force_machine=settings.force_machine)
    if not isinstance(plan.drafter, ModelRef):
        raise YggdrasilError(f"{plan.name} drafts without a model, which has no stages to schedule; take a draft model")
    predictor = path.parent / plan.predictor
    learned = Learned.load(predictor)
    lengths = AcceptedLengths(learned.mean_survival, learned.ratios, plan.shapes.verify_widths)
    profile, knots = profile_of_plan(path, predictor), torch.from_numpy(np.asarray(learned.acceptance.knots).copy())
    return _Subject(plan, root_of(path), profile, predictor, lengths, knots, is_head(plan.drafter.path()))


def _set_up(subject: _Subject, settings: SearchSettings, reporter: Reporter) -> _Bench:
    plan, prompts = subject.plan, settings.prompts
    assert prompts is not None
    found = read_prompts(prompts, chat=settings.chat)  # checked before a model is loaded
    schedules = tuple(schedule.labels for schedule in measured_schedules(subject.named))
    source = replace(PairSource.of_plan(plan, subject.predictor), schedules=schedules)
    tokenizer = load_tokenizer(source.target)
    longest = min(settings.context, plan.shapes.max_length - settings.tokens - plan.shapes.max_depth - 1)
    if longest < 1:
        raise YggdrasilError(
            f"--max-new-tokens {settings.tokens} leaves no room for a prompt in the context of "
            f"{plan.shapes.max_length} tokens; give less"
        )
    texts = [text[-longest:] for text in encode_prompts(tokenizer, spread_over(found, settings.limit))]
    texts = [text for text in texts if text]
    if not texts:
        raise YggdrasilError(f"{prompts} has no usable prompts; give JSON lines with a prompt field")
    assembly = build_assembly(source, subject.knots)
    assembly.complete(reporter.phase)
    return _Bench(assembly, tokenizer, texts, perf_counter() + 60 * settings.minutes)


def _stage_samples(
    subject: _Subject, settings: SearchSettings, bench: _Bench | None, reporter: Reporter
) -> pd.DataFrame:
    """Return the stage samples of all variants: from the profile, or newly measured and written to the profile."""
    file = subject.profile / SAMPLES_FILE
    if bench is None or (file.exists() and not settings.measure_again):
        if not file.exists():
            raise YggdrasilError(
                f"the profile {settings.profile} has no stage costs of all variants ({file}); give --prompts to measure"
            )
        return read_csv(file, "schedule-samples", SAMPLES_VERSION, COLUMNS)
    report = reporter.phase("measuring the stages of every variant")
    new_stream = partial(open_ended_stream, bench.tokenizer, settings.tokens)
    schedules = measured_schedules(subject.named)
    with on_device_clock(bench.assembly):
        frame = measure_stage_costs(
            bench.assembly, new_stream, bench.texts, report, schedules,
            seconds=_STAGES_SHARE * bench.seconds_left,
        )  # fmt: skip
    write_csv(file, "schedule-samples", SAMPLES_VERSION, frame)
    return frame


def _entry(name: str, candidate: Candidate, subject: _Subject) -> Searched:
    shape = candidate.shape
    return Searched(
        name, candidate.stages, (shape.width, shape.depth, shape.verify_width), subject.backend,
        rounded(candidate.aal), rounded(candidate.iteration_ms), rounded(candidate.ms_per_token),
    )  # fmt: skip


def _named_entries(best: Candidate, costs: StageCosts, subject: _Subject, taken: Sequence[Searched]) -> list[Searched]:
    """Return entries of the paper's plans and the default schedule, with the best plan's shape and depth prediction.

    So the entries differ only in the overlap of stages. The default is left out if ``taken`` has it.
    """
    shape, depth, lengths = best.shape, Schedule.parse(best.stages).variants["depth_prediction"], subject.lengths
    entries = []
    for name, variants in {**subject.named, "default": {}}.items():
        schedule = Schedule.of({**variants, "depth_prediction": depth})
        is_taken = any(entry.stages == schedule.labels and entry.shape == tuple(shape) for entry in taken)
        if name != "default" or not is_taken:
            ms = float(predict_ms(schedule, [shape], costs, lengths, subject.executor)[0])
            entries.append(_entry(name, Candidate(schedule.labels, shape, lengths.aal(shape), ms), subject))
    return entries


def _measured(
    entries: Sequence[Searched],
    bench: _Bench,
    plain_ms: float,
    subject: _Subject,
    settings: SearchSettings,
    reporter: Reporter,
) -> list[Searched]:
    """Measure the entries and plain decoding, and return them with measured values; plain decoding is last.

    All plans decode alternately. The fastest plan then alternates with the named plans alone, on the same prompts, for
    more certainty. Times are scaled so that a plain step takes ``plain_ms``, as in the profile.
    """
    plans = [MeasuredPlan(entry.name, entry.stages, TreeShape(*entry.shape)) for entry in entries]
    new_stream = partial(open_ended_stream, bench.tokenizer, settings.tokens)
    measure = partial(measure_plans, bench.assembly, new_stream)
    report = reporter.phase(f"measuring {len(entries)} plans on {len(bench.texts)} prompts")
    frame = measure(bench.texts, plans, settings.rounds, report, seconds=_PLANS_SHARE * bench.seconds_left)
    if settings.final_rounds:
        found = summarise_plans(frame, plain_ms).set_index("plan")["ms_per_token"].drop(PLAIN)
        finalists = [plan for plan in plans if plan.name in {found.idxmin(), *subject.named}]
        report = reporter.phase(f"measuring the fastest plan and {len(finalists) - 1} named plans")
        texts = bench.texts[: frame["prompt"].max() + 1]  # prompts that there was time for
        more = measure(texts, finalists, settings.final_rounds, report, seconds=bench.seconds_left)
        frame = pd.concat([frame, more.assign(round=more["round"] + settings.rounds)], ignore_index=True)
    write_csv(subject.profile / MEASURED_FILE, "schedule-measured", VERSION, frame)
    figures = {row["plan"]: row for row in summarise_plans(frame, plain_ms).to_dict("records")}
    ms = rounded(plain_ms)
    plain = Searched(PLAIN, Schedule.of({}).labels, (0, 0, 1), subject.backend, 1.0, ms, ms)
    return [
        replace(
            entry,
            measured_aal=rounded(figures[entry.name]["aal"]),
            measured_iteration_ms=rounded(figures[entry.name]["iteration_ms"]),
            measured_ms_per_token=rounded(figures[entry.name]["ms_per_token"]),
            measured_speedup=rounded(figures[entry.name]["speedup"]),
        )
        for entry in [*entries, plain]
    ]


def _choose(entries: Sequence[Searched], objective: Objective) -> Searched:
    """Return the entry with the lowest measured time per token; without measurements the best prediction.

    Ties go to the better prediction. For the objective "aal", an ablation, the best prediction is always returned.
    """
    top = [entry for entry in entries if entry.name.startswith("top")]
    if objective == "aal" or top[0].measured_ms_per_token is None:
        return top[0]
    candidates = [entry for entry in entries if entry.name != PLAIN]
    return min(candidates, key=lambda entry: entry.measured_ms_per_token or float("inf"))


def _adapted(base: Costs, chosen: Searched, costs: StageCosts, lengths: AcceptedLengths) -> Costs:
    """Return the policy's costs for the chosen schedule: ``base`` plus the stage times' differences to the default."""
    schedule, default, shape = Schedule.parse(chosen.stages), Schedule.of({}), TreeShape(*chosen.shape)
    if schedule.variants == default.variants:
        return base
    share = np.array([lengths.leaf_share(shape)])
    ours, usual = (costs.durations(each, [shape], share) for each in (schedule, default))
    ahead = schedule.variants["head_draft"] == "ahead"
    changes = {name: float(ours[name][0] - usual[name][0]) for name in ours}
    head = changes["tail_draft"] + (-float(usual["head_draft"][0]) if ahead else changes["head_draft"])
    rest = sum(ms for name, ms in changes.items() if name not in ("head_draft", "draft_steps", "verify", "tail_draft"))
    verify = dict(base.verify_ms)
    if ahead:
        wide = [TreeShape(shape.width, shape.depth, width) for width in sorted(verify) if width > 1]
        guesses = costs.durations(schedule, wide, np.repeat(share, len(wide)))["head_draft"]
        verify |= {
            each.verify_width: verify[each.verify_width] + float(ms) for each, ms in zip(wide, guesses, strict=True)
        }
    return replace(
        base, head_ms=max(rounded(base.head_ms + head), 0.0), overhead_ms=max(rounded(base.overhead_ms + rest), 0.0),
        # Noise may make a wider head draft cheaper; its cost then holds for the narrower one too.
        verify_ms={width: rounded(ms) for width, (ms, _) in lower_envelope(verify).items()},
    )  # fmt: skip
