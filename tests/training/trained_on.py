"""Trainings on the processor and on the device that stands in for a GPU; for a process of its own."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from other_device import DEVICE  # before anything that asks PyTorch for what it changes
from own_texts import RecordedLines

from yggdrasil.calibration.calibration_settings import TextBudget
from yggdrasil.calibration.own_text import OwnText
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.runtime.loading import load_model
from yggdrasil.training import run, training
from yggdrasil.training.settings import TrainSettings
from yggdrasil.training.state import KeptTraining
from yggdrasil.training.training import train

_DEVICES = {"cpu": torch.device("cpu"), "cuda": DEVICE}


def texts_written(target: str, folder: Path) -> dict[str, tuple[list[int], int]]:
    """By device: the answer to the one prompt that is given, and how many texts there are, some of turns it drew."""
    found, source = {}, Source.find(target)
    for name, device in _DEVICES.items():
        loaded = load_model(source, torch.float32, device, 1)
        writer = OwnText(loaded, load_tokenizer(source), [[8, 9]], folder / name)
        written = writer.write(TextBudget(3600.0, 80), folder / f"{name}.json", RecordedLines().phase)
        found[name] = (written[0].answer, len(written))
    return found


def unlikeness(target: str, start: Path | None, folder: Path) -> float:
    """How far what two runs of a step each have learned there is from what they learn here.

    In shares of the greatest number of every tensor, the optimizer's among them, the greatest share. Second moments
    are compared by their roots, which are of a gradient's size. A bias of the keys is left out: it moves all scores of
    a query alike but for the rotary embedding, so that its gradient is mostly rounding.
    """
    here, there = (_trained(target, name, start, folder / f"{start is None}-{name}") for name in _DEVICES)
    assert here.keys() == there.keys()
    return max(float((here[name] - there[name]).abs().max() / here[name].abs().max().clamp(min=1e-9)) for name in here)


def _trained(target: str, device: str, start: Path | None, out: Path) -> dict[str, torch.Tensor]:
    settings = TrainSettings(target, out, minutes=0.0, tokens=1, threads=1, start=start, device=device)
    used, loss_of = [], run.loss_of

    def loss_noted(steps, teacher, batch):
        loss = loss_of(steps, teacher, batch)
        used.append(loss.device.type)
        return loss

    def no_autocast(where, dtype):  # what it rounds differs between devices
        used.append(where)
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGGDRASIL_CACHE", str(out.parent / "cache"))
        patch.setattr(training, "open_device", _DEVICES.__getitem__)
        patch.setattr(torch, "autocast", no_autocast)
        patch.setattr(run, "loss_of", loss_noted)
        for _ in range(2):
            train(settings, RecordedLines())
    assert set(used) == {_DEVICES[device].type}
    kept = KeptTraining.read(settings.work, Source.find(target).fingerprint(), print)
    assert kept is not None
    assert kept.progress.steps == 2
    return {
        name: tensor.float().sqrt() if name.startswith("exp_avg_sq.") else tensor.float()
        for name, tensor in kept.tensors.items()
        if not name.endswith("k_proj.bias")
    }
