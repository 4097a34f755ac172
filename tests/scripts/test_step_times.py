"""Steps timed one by one: each runs at the context asked for, all take turns, and the table adds up."""

from dataclasses import replace

import pytest
import torch
from step_times import REPEATS, roofline, time_steps, with_shapes
from tiny_pair import SHAPES, make_pair

from yggdrasil.calibration.measurement.steps import timed_steps
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.profiling.timers import timer_for
from yggdrasil.runtime.passes import Readback

ROUNDS = 2
CONTEXTS = (5, 40)


@pytest.fixture(scope="module")
def assembly():
    return make_pair().decoder(PLAIN_POLICY).assembly


def test_every_decoding_step_is_timed_at_every_context(assembly):
    steps = timed_steps([assembly], CONTEXTS)
    keys = {(step.model, step.step, step.width, step.context) for step in steps}
    wanted = {("target", "plain", 1)} | {("target", "verify", width) for width in SHAPES.verify_widths[1:]}
    wanted |= {("drafter", "grow", width) for width in SHAPES.draft_widths}
    wanted |= {("drafter", "head", width) for width in assembly.engine.drafter.head_widths}
    assert keys == {(*key, context) for key in wanted for context in CONTEXTS}
    assert len(steps) == len(keys)


def test_a_step_runs_behind_its_context(assembly):
    """Keys of the step land right behind the context, nowhere else."""
    for step in timed_steps([assembly], CONTEXTS):
        runner = getattr(assembly, step.model)
        for cache in runner.cache.tensors():
            cache.zero_()
        step.prepare()
        step.run()
        written = runner.cache.keys[0].abs().sum(dim=(0, 2)).nonzero().flatten().tolist()
        assert written[0] == step.context, step[:4]
        assert written[-1] <= step.context + SHAPES.num_nodes + SHAPES.max_depth


def test_the_rows_of_a_pass_are_different_tokens(assembly):
    """Equal ones would choose the same experts of a mixture."""
    for step in timed_steps([assembly], CONTEXTS[:1]):
        if step.step == "verify":
            step.prepare()
            step.run()
            values = assembly.target.cache.values[0][:, step.context : step.context + step.width]
            assert len(torch.unique(values, dim=1)[0]) == step.width, step[:4]


def test_the_table_holds_every_step_with_its_limits(assembly):
    fractions = []
    steps = timed_steps([assembly], CONTEXTS)
    samples = time_steps(steps, ROUNDS, fractions.append)
    assert len(samples) == len(steps) * ROUNDS * REPEATS
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0

    table = roofline(assembly, samples)
    assert len(table) == len(steps)
    assert (table["share_of_limit"] * table["ms"]).tolist() == pytest.approx(table["least_ms"].tolist())
    plain = table[(table["model"] == "target") & (table["width"] == 1)]
    assert plain["against_plain"].tolist() == [1.0] * len(CONTEXTS)
    for _, group in table.groupby(["model", "step", "width"]):
        assert group.sort_values("context")["megabytes"].is_monotonic_increasing


def test_capacities_take_turns_step_by_step(assembly):
    larger = with_shapes(assembly, replace(SHAPES, max_length=300))
    assert larger.target.loaded is assembly.target.loaded
    steps = timed_steps([assembly, larger], CONTEXTS)
    assert [step[:4] for step in steps[::2]] == [step[:4] for step in steps[1::2]]
    assert {step.capacity for step in steps[::2]} == {SHAPES.max_length}
    assert {step.capacity for step in steps[1::2]} == {300}

    table = roofline(assembly, time_steps(steps, 1, lambda fraction: None))
    assert len(table) == len(steps)
    small, large = (table[table["capacity"] == capacity] for capacity in (SHAPES.max_length, 300))
    assert (small["against_smallest"] == 1.0).all()
    assert large["against_smallest"].tolist() == pytest.approx(
        (large["ms"].to_numpy() / small["ms"].to_numpy()).tolist()
    )


def test_a_gpu_is_timed_by_events_behind_a_run_that_is_not_timed(monkeypatch):
    log = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, later):
            return 3.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert timer_for(torch.device("cuda"))(lambda: log.append("run")) == 3.5
    assert log == ["run", "event", "run", "event", "wait"]


def test_captured_steps_are_timed_without_what_the_host_reads(monkeypatch):
    assembly = make_pair().decoder(PLAIN_POLICY, backend="cudagraph").assembly
    monkeypatch.setattr(Readback, "wait", None)  # would raise
    samples = time_steps(timed_steps([assembly], CONTEXTS[:1]), 1, lambda _: None)
    assert set(samples["step"]) == {"plain", "verify", "head", "grow"}
