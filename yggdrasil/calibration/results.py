"""Writes the results of a calibration: samples to the profile, fitted tables to the predictor, and the plan."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from yggdrasil.artifacts import atomic_directory, predictor_directory, profile_directory, write_csv
from yggdrasil.calibration.calibration_settings import CalibrationSettings
from yggdrasil.calibration.choose import Choice
from yggdrasil.calibration.measurement.steps import COLUMNS, Sample
from yggdrasil.calibration.statistics.learning import LearnedStatistics
from yggdrasil.drafters.heads.draft_vocabulary import FILE_NAME, Vocabulary
from yggdrasil.scheduling.plan import Plan

SAMPLES_VERSION = 1
THREADS_FILE = "threads.csv"  # a by-product, for inspection


def write_results(
    settings: CalibrationSettings,
    plan: Plan,
    destination: Path,
    choice: Choice,
    counted: LearnedStatistics | None,
    vocabulary: Vocabulary | None,
    samples: Sequence[Sample],
    work: Path,
) -> None:
    """Write the profile and predictor folders of a calibration atomically, then its plan; older files are replaced.

    Args:
        destination: path of the plan.
        choice: has the acceptance calibration, depth predictor and survival tables to write, if there is a drafter.
        counted: n-gram scorer and table to write; None if the plan uses no n-gram statistics.
        vocabulary: draft vocabulary of a head; None if it is not restricted.
        samples: times of steps and iterations.
        work: folder of intermediate results.

    Raises:
        ArtifactError: a folder or file cannot be written.
    """
    profile = profile_directory(settings.root, settings.name, plan.machine)
    frame = pd.DataFrame(samples, columns=list(COLUMNS))
    with atomic_directory(profile) as folder:
        write_csv(folder / "stage_samples.csv", "stage-samples", SAMPLES_VERSION, frame)
        if (work / THREADS_FILE).exists():
            shutil.copyfile(work / THREADS_FILE, folder / THREADS_FILE)
    with atomic_directory(predictor_directory(settings.root, settings.name, plan.machine)) as folder:
        if choice.learned is not None:
            choice.learned.save(folder)
        if counted is not None:
            counted.save(folder)
        if vocabulary is not None:
            vocabulary.save(folder / FILE_NAME)
    plan.save(destination)
