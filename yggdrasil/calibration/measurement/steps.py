"""Times single steps of target and drafter at given contexts, in turns.

A shared machine's speed changes within seconds, so every step takes its turn before any step takes another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import NamedTuple

import torch

from yggdrasil.compiler.compiled import Backend
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.native.one_thread import one_thread
from yggdrasil.profiling.timers import Timer, host_ms

TIMED = ("plain", "verify", "head", "grow")
_LEAST_TURNS = 2  # even if the time is up


class TimedStep(NamedTuple):
    """One step at one context length. To run the step, call ``prepare``, then ``run``."""

    model: str  # "target" or "drafter"
    step: str  # one of ``TIMED``
    width: int  # rows of a target's pass, or nodes that a draft step attaches
    context: int  # tokens in the KV caches
    capacity: int  # tokens that the KV caches can hold
    backend: Backend
    prepare: Callable[[], None]
    run: Callable[[], object]


def timed_steps(assemblies: Sequence[Assembly], contexts: Sequence[int], token: int = 1) -> list[TimedStep]:
    """Return the steps to time: every step of target and drafter except prefill, at every context length.

    The steps are ordered by context, with the target's before the drafter's. The contents of the caches are arbitrary,
    since they do not change the time.

    Args:
        assemblies: the same models with caches of several capacities or on several backends. Equal steps are adjacent
            in the result.
        contexts: context lengths in tokens.
        token: token id that fills the text.
    """
    steps: list[TimedStep] = []
    for context in contexts:
        for kind in (_target_steps, _drafter_steps):
            over_each = [kind(assembly, context, token) for assembly in assemblies]
            steps += [step for same in zip(*over_each, strict=True) for step in same]
    return steps


class Timing(NamedTuple):
    """The time of one run of a step."""

    step: TimedStep
    turn: int  # from 1
    ms: float


class Sample(NamedTuple):
    """One measured time: of a step, or of a stage of a real iteration."""

    context: int  # tokens in the KV caches
    cycle: int  # number of the turn in which it was measured
    width: int  # draft width; 0 without drafted nodes
    depth: int  # drafted levels of an iteration
    verify_width: int  # rows of the target's pass
    stage: str  # a stage of ``scheduling.stages``, "plain", "overhead", "iteration", "reading", "pass" or "grow"
    ms: float


COLUMNS = Sample._fields


def measure_steps(
    assembly: Assembly,
    context: int,
    turns: int,
    progress: Callable[[float], None],
    timer: Timer = host_ms,
    *,
    seconds: float = inf,
) -> list[Sample]:
    """Time every pass of the target and every draft step with ``context`` tokens in the caches, which are then cleared.

    A pass has samples of the stage "pass" and its ``verify_width`` (the plain step: 1), a draft step of the stage
    "grow" and its draft ``width``; all in milliseconds.

    Args:
        turns: in a turn every step runs once; at least 1.
        progress, timer, seconds: as in ``time_in_turns``.
    """
    steps = [step for step in timed_steps([assembly], [context]) if step.step != "head"]
    found = time_in_turns(steps, turns, progress, timer, seconds=seconds)
    assembly.forget()
    return [
        Sample(context, turn, 0, 0, step.width, "pass", ms)
        if step.model == "target"
        else Sample(context, turn, step.width, 0, 1, "grow", ms)
        for step, turn, ms in found
    ]


@torch.inference_mode()
def time_in_turns(
    steps: Sequence[TimedStep],
    turns: int,
    progress: Callable[[float], None],
    timer: Timer = host_ms,
    *,
    repeats: int = 1,
    seconds: float = inf,
) -> list[Timing]:
    """Time all steps in turns, and return one timing per timed run, in the order of the runs.

    In a turn, every step is prepared, runs once untimed and then ``repeats`` times timed. An untimed turn warms up
    first. Every other turn has the reverse order, because the contents of the CPU caches depend on the step before.

    Args:
        turns: the most timed turns, at least 1.
        progress: called with the fraction done, 0 to 1.
        timer: calls a function and returns its milliseconds.
        seconds: no turn begins later than this after the call, except the warm-up and the first two timed turns.
    """
    found, began = list[Timing](), perf_counter()
    with one_thread():  # idle PyTorch threads would spin on the cores that our operators use
        for turn in range(turns + 1):
            for step in steps if turn % 2 else reversed(steps):
                step.prepare()
                step.run()
                times = [timer(step.run) for _ in range(repeats)]
                found += [Timing(step, turn, ms) for ms in times if turn]
            spent = perf_counter() - began
            progress(min(1.0, max(turn / turns, spent / seconds)))
            if turn >= _LEAST_TURNS and spent > seconds:
                break
    return found


def _target_steps(assembly: Assembly, context: int, token: int) -> list[TimedStep]:
    engine = assembly.engine

    def prepare() -> None:
        engine.target.prepare_cache(context)
        engine.target.text.pretend([token] * context, context)
        engine.tree.plant(token)
        # Equal tokens choose the same experts, which would make a mixture's wide passes look cheap.
        engine.tree.tokens.copy_(token + stride * torch.arange(engine.tree.num_nodes))

    stride = max(1, (assembly.target.loaded.vocab_size - 1 - token) // engine.tree.num_nodes)
    target = engine.target
    plain = target.launch_plain if isinstance(target, CapturedTarget) else target.plain  # nothing that is timed waits
    runs: dict[str, Callable[[int], object]] = {
        "plain": lambda _: plain(token),
        "verify": engine.target.verify,
    }
    return [
        TimedStep("target", step, width, context, *_setting(assembly), prepare, partial(runs[step], width))
        for step, width in assembly.target.defined
        if step in TIMED
    ]


def _drafter_steps(assembly: Assembly, context: int, token: int) -> list[TimedStep]:
    drafter = assembly.engine.drafter
    if drafter is None or (steps := drafter.capabilities.steps) is None:
        return []
    runner = steps.runner

    def prepare() -> None:
        steps.pretend_context(context, token)
        steps.head()

    def run(step: str, width: int) -> object:
        return runner.launch((step, width))

    return [
        TimedStep("drafter", step, width, context, *_setting(assembly), prepare, partial(run, step, width))
        for step, width in runner.defined
        if step in TIMED
    ]


def _setting(assembly: Assembly) -> tuple[int, Backend]:
    return assembly.shapes.max_length, assembly.target.backend
