"""Makes the provisional plan of a model's first use, from shipped acceptance statistics and quickly measured costs.

The costs are T(W) of the target, the time of draft steps and the overhead of an iteration. Later answers update costs
and acceptance (``engine.online_estimates``).
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from yggdrasil.artifacts import current_machine, predictor_directory
from yggdrasil.artifacts.atomic import atomic_directory
from yggdrasil.calibration.calibration_settings import FIRST_DRAFT_WIDTHS, FIRST_VERIFY_WIDTHS, PairSource, versions
from yggdrasil.calibration.measurement.costs import costs_from, shows_pause
from yggdrasil.calibration.measurement.iterations import measure_iterations, measured_policies, on_device_clock
from yggdrasil.calibration.measurement.steps import Sample, measure_steps
from yggdrasil.calibration.pair import check_pair, default_drafter_weights, default_max_length
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.drafters.model_free_options import ModelFreeOptions, StatisticsOptions
from yggdrasil.drafters.registry import NamedDrafters
from yggdrasil.drafters.shipped_assets import table_folder
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.loading import DtypeName
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.profiling.timers import timer_for
from yggdrasil.scheduling.plan import Costs, DeviceName, Expectation, Plan, Shapes
from yggdrasil.scheduling.stages import DEFAULT_ORDER

CONTEXT = 128  # tokens in the KV caches while steps are timed
SECONDS, ROUNDS = 2.5, 6  # timing ends after so many seconds or rounds, whichever comes first
_PROMPT = 48  # length of the prompt on which iterations are timed
ITERATIONS = 4  # timed iterations of each kind
_ASSUMED_MS, _A_ROW = 10.0, 0.02  # assumed before measuring: milliseconds of a plain step, share that a row adds
_EXPECTED = Expectation("shipped acceptance statistics", 1.0, _ASSUMED_MS, 1.0)


def first_plan(
    model: Source,
    named: NamedDrafters,
    dtype: DtypeName,
    name: str,
    root: Path,
    device: DeviceName = "cpu",
    agreement: Sequence[float] = (),
    tokenizer: Tokenizer | None = None,
) -> tuple[Plan, Tokenizer]:
    """Return a provisional plan of a model, with assumed step costs, and the target's tokenizer. Nothing is measured.

    The n-gram scorer, and the model's n-gram table if one is shipped, are written to the predictor folder in ``root``.

    Args:
        model: the target's checkpoint.
        named: the drafters to use.
        name: name of the plan.
        root: folder with the folders ``plans`` and ``predictors``.
        agreement: share of the drafter's tokens that equal the target's, by draft step; empty: not known.
        tokenizer: the target's if already loaded, else None.

    Raises:
        YggdrasilError: a model is unsupported, or target and drafter are incompatible.
    """
    machine, drafter = current_machine(), named.drafter
    shapes = Shapes(
        max_length=default_max_length(model.given, drafter, device),
        draft_widths=() if drafter is None else FIRST_DRAFT_WIDTHS,
        verify_widths=(1,) if named.is_plain else FIRST_VERIFY_WIDTHS[device],
    )
    weights, drafter_weights = usual_weights(model, dtype, device), default_drafter_weights(drafter, dtype, device)
    table = table_folder(model.fingerprint())
    model_free = tuple(_with_shipped(each, table) for each in named.model_free)
    pair = PairSource(model.given, drafter, dtype, 0, 0, shapes, weights, drafter_weights, device, model_free)
    tokenizer = check_pair(pair, tokenizer)
    folder = predictor_directory(root, name, machine)
    with atomic_directory(folder) as partial:
        _write_statistics(partial, model_free, table)
    pair = replace(pair, target_threads=machine.cores, drafter_threads=machine.cores)
    plan = Plan(
        name=name, machine=machine,
        versions=versions(), dtype=dtype, target=pair.target_ref(), drafters=[*pair.drafter_refs(), *model_free],
        tokenizer=model.tokenizer_fingerprint(), shapes=shapes,
        stages=DEFAULT_ORDER, objective="latency", depth_from="mean",
        predictor=Path("../..", folder.relative_to(root)).as_posix(), costs=[_assumed(shapes)], predicted=_EXPECTED,
        is_provisional=True, device=device, agreement=tuple(agreement),
    )  # fmt: skip
    return plan, tokenizer


def _with_shipped(options: ModelFreeOptions, table: Path | None) -> ModelFreeOptions:
    """Return ``options`` without the n-gram table if none is shipped for the target: counting one takes minutes."""
    if not isinstance(options, StatisticsOptions):
        return options
    return replace(options, table=options.table and table is not None)


def _write_statistics(folder: Path, model_free: Sequence[ModelFreeOptions], table: Path | None) -> None:
    """Write the scorer that the drafters of ``model_free`` read, and the shipped table if one of them uses it."""
    if table is not None and any(isinstance(each, StatisticsOptions) and each.table for each in model_free):
        for name in (SCORER_FILE, TABLE_FILE):
            shutil.copyfile(table / name, folder / name)
    else:
        NGramScorer.of_shipped_text().save(folder / SCORER_FILE)


def _assumed(shapes: Shapes) -> Costs:
    verify_ms = {width: _ASSUMED_MS * (1.0 + _A_ROW * (width - 1)) for width in shapes.verify_widths}
    draft_ms = dict.fromkeys(shapes.draft_widths, _ASSUMED_MS / 4)
    return Costs(CONTEXT, _ASSUMED_MS / 4 if draft_ms else 0.0, draft_ms, verify_ms, 0.1, _ASSUMED_MS)


def with_measured_costs(
    plan: Plan, assembly: Assembly, tokenizer: Tokenizer, progress: Callable[[float], None]
) -> Plan:
    """Time the steps of a loaded model for a few seconds, and return a copy of ``plan`` with the costs in milliseconds.

    If a pause of the machine made a step's time too long, all steps are timed once more. The KV caches are cleared.

    Args:
        assembly: models and steps, built from ``plan``.
        progress: takes the fraction done, 0 to 1.
    """
    context = max(1, min(CONTEXT, assembly.engine.max_length // 2))
    timer, samples = timer_for(assembly.target.loaded.device), list[Sample]()
    for _ in range(2):
        samples += measure_steps(assembly, context, ROUNDS, progress, timer, seconds=SECONDS)
        if not shows_pause(samples):
            break
    samples += _iteration_samples(assembly, tokenizer, context)
    assembly.forget()
    return replace(plan, costs=costs_from(samples, plan.shapes))


def _iteration_samples(assembly: Assembly, tokenizer: Tokenizer, context: int) -> list[Sample]:
    """Time some iterations that verify the widest model-free tree, and some that draft.

    The prompt repeats itself, so that there are model-free drafts.
    """
    prompt = [1 + number % min(8, assembly.target.call.vocab_size - 1) for number in range(min(context, _PROMPT))]
    plain, *trees = measured_policies(assembly)
    with on_device_clock(assembly):
        timed = measure_iterations(
            assembly, lambda: TextStream(tokenizer, frozenset(), 1 << 20, ()), prompt, trees[:2] or [plain],
            ITERATIONS, 1, lambda _: None,
        )  # fmt: skip
    return [sample._replace(context=context) for sample in timed]
