"""Memory that is slow for a while, played through the whole engine by a clock that only passes and drafts turn."""

import numpy as np
import pytest
from tiny_pair import TEXT

from yggdrasil.engine import engine as engine_module
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.scheduling import executors
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.step_costs import OVERLAP, StepCosts

DEPTH = 4
# Eight rows hold one guess more of a chain than four. While memory is fast they cost three eighths more, which is more
# than that guess is worth; while it is slow, an eighth.
COSTS = StepCosts(
    head_ms=0.7, draft_ms={1: 0.2, 2: 0.2}, verify_ms={1: 15.4, 2: 15.5, 4: 16.0, 8: 22.0, 16: 40.0}, overhead_ms=0.3,
    plain_ms=15.5,
)  # fmt: skip
FAST, SLOW = TreeShape(1, 3, 4), TreeShape(1, 4, 8)


class PlayedClock:
    """Nanoseconds that go by while something is done that costs time."""

    def __init__(self):
        self.now, self.memory = 0, 1.0

    def __call__(self):
        return self.now

    def passes(self, width):
        row, whole = (COSTS.verify_ms[rows] ** OVERLAP for rows in (1, width))
        return (self.memory**OVERLAP * row + whole - row) ** (1 / OVERLAP)

    def charging(self, function, milliseconds):
        def charged(*given):
            self.now += round(1e6 * milliseconds(*given))
            return function(*given)

        return charged


class Noting(ObjectivePolicy):
    """Tells what was done."""

    def __init__(self):
        levels, rows = np.arange(DEPTH), np.array(COSTS.verify_widths)
        held = (levels[None, :, None] <= levels[:, None, None]) & (levels[None, :, None] + 1 < rows)  # [D, D, V]
        ratios = {1: held * 1.0, 2: held * 0.9}
        super().__init__({100: COSTS}, ratios, np.full(DEPTH, 0.98, dtype=np.float32), None)
        self.shapes = []

    def settle(self, decision, *given, **named):
        self.shapes.append(decision.shape)
        super().settle(decision, *given, **named)


@pytest.fixture
def played(perfect_pair, monkeypatch):
    """Requests at a speed of memory; the shapes of the last one, behind its two plain steps."""
    clock, policy = PlayedClock(), Noting()
    decoder = perfect_pair.decoder(policy)
    for module in (engine_module, executors):
        monkeypatch.setattr(module, "perf_counter_ns", clock)
    target, drafter = decoder.assembly.engine.target, decoder.assembly.engine.drafter
    for owner, name, milliseconds in (
        (target, "plain", lambda _: clock.passes(1)),
        (target, "verify", clock.passes),
        (drafter, "head", lambda _: COSTS.head_ms),
        (drafter, "grow", lambda _, width, depth: COSTS.draft_ms[width] * (depth - 1)),
    ):
        monkeypatch.setattr(owner, name, clock.charging(getattr(owner, name), milliseconds))

    def play(memory, requests):
        clock.memory = memory
        for number in range(requests):
            policy.shapes.clear()
            prompt = TEXT[number : number + 9]
            assert decoder.generate(prompt, max_new_tokens=120).tokens == perfect_pair.reference(prompt, 120)
        return policy.shapes[2:]

    return play


def test_trees_grow_while_memory_is_slow_and_shrink_when_it_is_fast_again(played):
    """In depth and in width; now and then a narrow pass looks."""
    fast, slow, fast_again = (played(memory, requests=6) for memory in (1.0, 1.4, 1.0))

    assert set(fast) == set(fast_again) == {FAST}
    assert slow.count(SLOW) >= 0.8 * len(slow)
