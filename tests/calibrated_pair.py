"""A tiny random pair on disk, calibrated by the program itself: what the documented paths are tried on."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_pair import chat_tokenizer, noisy_copy, random_model

from yggdrasil.calibration.calibration_settings import QUICK
from yggdrasil.cli import main

NAME = "end-to-end"
MAX_LENGTH = 448
WORDS = "the only way, on an inner tour. Never enter in an Inn at one, or turn on a set. It is an art, a tin"


class CalibratedPair(NamedTuple):
    """Folders of two checkpoints with a tokenizer, prompts, and the plan that was made of them in ``root``."""

    root: Path
    target: Path
    drafter: Path
    prompts: Path
    plan: Path


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Target and drafter as checkpoint folders in float32; turns of a chat end with the text."""
    target = random_model(max_position_embeddings=512, eos_token_id=0)
    paths = folder / "target", folder / "drafter"
    for path, model in zip(paths, (target, noisy_copy(target, 0.006)), strict=True):
        model.save_pretrained(path)
        chat_tokenizer().save_pretrained(path)
    return paths


def write_prompts(path: Path) -> None:
    """Short prompts of two categories."""
    texts = [WORDS[i : i + 30] for i in range(0, 60, 10)]
    records = [{"id": str(i), "category": "ab"[i % 2], "prompt": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def run_program(*arguments: object) -> int:
    """Run ``yggdrasil`` in this process and return its exit code."""
    given, sys.argv = sys.argv, ["yggdrasil", *map(str, arguments)]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = given
    return 0


def calibrate(root: Path) -> CalibratedPair:
    """Write a pair and calibrate it."""
    (target, drafter), prompts = write_pair(root), root / "prompts.jsonl"
    write_prompts(prompts)
    return CalibratedPair(root, target, drafter, prompts, write_plan(root, target, drafter, prompts, "--keep-drafter"))


def write_plan(root: Path, target: Path, drafter: Path, prompts: Path, *options: str) -> Path:
    """Calibrate, with as few steps to compile as a plan can have and little text; returns the plan's path."""
    little = replace(QUICK, tokens=24, samples=4, own_text=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("yggdrasil.calibration.calibration_settings.QUICK", little)
        code = run_program(
            "calibrate", target, "--drafter", drafter, "--prompts", prompts, "--name", NAME, "--root", root,
            "--quick", "--dtype", "float32", "--max-length", MAX_LENGTH, "--max-depth", 2, "--target-threads", 1,
            "--drafter-threads", 1, "--draft-widths", "1,2", "--verify-widths", "1,2,4", *options,
        )  # fmt: skip
    assert code == 0
    (plan,) = (root / "plans" / NAME).glob("*.yaml")
    return plan
