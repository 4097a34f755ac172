"""Artefacts of a made-up pair on this machine, with stage samples that can be added up by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from tiny_pair import SHAPES

from yggdrasil.artifacts import current_machine, plan_path, predictor_directory, profile_directory, write_csv
from yggdrasil.calibration.measurement.steps import COLUMNS as SAMPLE_COLUMNS
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table_files import SCORER_FILE
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import FeatureSizes
from yggdrasil.scheduling.costs import COLUMNS, LOOP, TIMES, schedule_code
from yggdrasil.scheduling.plan import Costs, Expectation, ModelRef, Plan
from yggdrasil.scheduling.stages import DEFAULT_ORDER, STAGES, Schedule, all_variants

PLAIN_MS = 9.0


def learned(shapes=SHAPES):
    """Acceptance that rises with width and verify width; a predictor of zeros over one feature."""
    depths = range(1, shapes.max_depth + 1)
    ratios = {
        width: np.array(
            [
                [
                    [
                        min(1.0, 0.6 + 0.1 * width) * min(1.0, verify / (1 + width * level))
                        for verify in shapes.verify_widths
                    ]
                    for level in depths
                ]
                for _ in depths
            ],
            dtype=np.float32,
        )
        for width in shapes.draft_widths
    }
    zeros = {name: np.zeros(size, dtype=np.float32) for name, size in
             (("mean", 1), ("first_weight", (1, 2)), ("first_bias", 2), ("second_weight", (2, 2)), ("second_bias", 2),
              ("head_weight", (2, shapes.max_depth)), ("head_bias", shapes.max_depth))}  # fmt: skip
    predictor = DepthPredictor(scale=np.ones(1, dtype=np.float32), **zeros)
    survival = np.array([0.9**level for level in depths], dtype=np.float32)
    return Learned(AcceptanceCalibration.identity(), predictor, FeatureSizes(1, 0, 0), survival, ratios)


def schedule_samples(shapes=SHAPES):
    """A millisecond a stage and between stages, two for a tail ahead; verification takes its width."""
    rows = [(64, 1, schedule_code(Schedule.of({})), 0, 0, 1, PLAIN_MS, *[None] * len(TIMES[1:]))]
    for chosen in all_variants():
        schedule = Schedule.of(chosen)
        for width in shapes.draft_widths:
            for depth in (2, shapes.max_depth):
                for verify_width in shapes.verify_widths[1:]:
                    times = dict.fromkeys((*STAGES, LOOP), 1.0)
                    times |= {"verify": float(verify_width), "tail_draft": 2.0 * (chosen["tail_draft"] == "ahead")}
                    total, size = sum(times.values()), (width, depth, verify_width)
                    rows.append((64, 1, schedule_code(schedule), *size, total, *(times[name] for name in TIMES[1:])))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def stage_samples(shapes=SHAPES):
    """Three turns: a pass takes a millisecond a row plus context / 64, a draft step 0.1 a node; 10 % spread.

    Iterations are plain, with free trees, whose stages are quicker, and with drafted ones.
    """
    rows, deepest = [], shapes.max_depth
    for context in (64, 128):
        for cycle, spread in enumerate((0.9, 1.0, 1.1), start=1):
            rows.append((context, cycle, 0, 0, 1, "pass", PLAIN_MS))
            rows += [
                (context, cycle, 0, 0, width, "pass", spread * (width + context / 64))
                for width in shapes.verify_widths[1:]
            ]
            rows += [(context, cycle, width, 0, 1, "grow", 0.1 * width) for width in shapes.draft_widths]
            rows += [(context, cycle, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")]
            rows.append((context, cycle, 0, 1, shapes.verify_widths[-1], "verify", 0.5))
            for width in shapes.draft_widths:
                rows += [(context, cycle, width, deepest, 8, stage, spread) for stage in ("verify", "draft_steps")]
    return pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))


def plan(name: str = "made-up", **changes) -> Plan:
    """Of a target that takes a millisecond a row."""
    machine = current_machine()
    costs = Costs(
        64, 1.0, {width: 0.1 * width for width in SHAPES.draft_widths},
        {width: float(width) + 1 for width in SHAPES.verify_widths}, 0.5, PLAIN_MS,
    )  # fmt: skip
    made = Plan(
        name, machine, {"yggdrasil": "0"}, "float32", ModelRef("owner/target", "0", 1),
        [ModelRef("owner/drafter", "1", 1), StatisticsOptions(table=False)], "2", SHAPES, DEFAULT_ORDER, "latency",
        "predictor",
        f"../../predictors/{name}/{machine.slug}", [costs],
        Expectation("depth from predictor", 2.5, 4.5, 2.0),
    )  # fmt: skip
    return replace(made, **changes)


def write_artifacts(root: Path, name: str = "made-up", **changes) -> Path:
    """A plan with its predictor and profile below ``root``; returns the plan's path."""
    machine, destination = current_machine(), plan_path(root, name, current_machine())
    predictor = predictor_directory(root, name, machine)
    plan(name, **changes).save(destination)
    learned().save(predictor)
    NGramScorer.default(with_table=False).save(predictor / SCORER_FILE)
    profile = profile_directory(root, name, machine)
    write_csv(profile / "stage_samples.csv", "stage-samples", 1, stage_samples())
    write_csv(profile / "schedule_samples.csv", "schedule-samples", 2, schedule_samples())
    return destination
