"""A plan's device: where its pair runs, and by which clock its stages are timed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scheduling.test_plan import made_up_plan

from yggdrasil.calibration import first_use
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.measurement.iterations import on_device_clock
from yggdrasil.engine.trace import EventExecutor, InOrderExecutor


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pair_of_a_plan_runs_where_the_plan_says(device):
    assert PairSource.of_plan(made_up_plan(device=device), Path()).device == device


@pytest.mark.parametrize(("device", "kind"), [("cpu", InOrderExecutor), ("cuda", EventExecutor)])
def test_stages_are_timed_by_the_clock_of_the_device(monkeypatch, device, kind):
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(is_timing=enable_timing))
    usual = InOrderExecutor()
    target = SimpleNamespace(loaded=SimpleNamespace(device=torch.device(device)))
    assembly = SimpleNamespace(engine=SimpleNamespace(executor=usual), target=target)

    with on_device_clock(assembly):
        assert type(assembly.engine.executor) is kind
    assert assembly.engine.executor is usual


def test_a_first_use_times_iterations_by_the_clock_of_the_device(monkeypatch):
    kinds = []

    def measure(assembly, *_):
        kinds.append(type(assembly.engine.executor))
        return []

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: None)
    monkeypatch.setattr(first_use, "measured_policies", lambda _: [None])
    monkeypatch.setattr(first_use, "measure_iterations", measure)
    target = SimpleNamespace(loaded=SimpleNamespace(device=torch.device("cuda")), call=SimpleNamespace(vocab_size=10))
    first_use._iteration_samples(
        SimpleNamespace(engine=SimpleNamespace(executor=InOrderExecutor()), target=target), None, 16
    )

    assert kinds == [EventExecutor]
