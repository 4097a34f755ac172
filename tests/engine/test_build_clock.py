"""An iteration that loaded a step is not held against speculation: it will not load it again."""

import pytest
from tiny_pair import TEXT, make_pair

from yggdrasil.compiler.compiled import BuildClock
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

LOADING_NS = 1


class NotingPolicy(FixedPolicy):
    def __init__(self, shape):
        super().__init__(shape)
        self.milliseconds = []

    def observe(self, decision, tokens, milliseconds):
        self.milliseconds.append(milliseconds)


def test_loading_is_not_settled(monkeypatch):
    policy = NotingPolicy(TreeShape(2, 2, 4))
    decoder = make_pair().decoder(policy)
    runner = decoder.assembly.target
    build = runner.step
    loaded = set()

    def step(name, width):
        if (name, width) not in loaded:
            loaded.add((name, width))
            BuildClock.ns += LOADING_NS
        return build(name, width)

    monkeypatch.setattr(runner, "step", step)
    monkeypatch.setattr(BuildClock, "ns", 0)
    iterations = [decoder.generate(TEXT[:9], max_new_tokens=12).metrics.iterations for _ in range(2)]

    # The first iteration loads the verification step; no later one loads anything.
    assert len(policy.milliseconds) == sum(iterations) - 1


def test_a_complete_decoder_builds_nothing_more():
    assembly = make_pair().decoder(FixedPolicy(TreeShape(2, 2, 4))).assembly
    assembly.complete()
    runner = assembly.target
    built = set(runner._steps)

    assert built == set(runner.defined)
    module, _ = runner._defined["verify", 2]
    runner.define("late", 2, module, [])
    with pytest.raises(YggdrasilError, match="the step late of width 2 was not prepared"):
        runner.step("late", 2)


def test_what_is_asked_for_later_is_built_before_it_decodes():
    assembly = make_pair().decoder(FixedPolicy(TreeShape(2, 2, 4))).assembly
    assembly.complete()
    assert assembly.logit_target is not None
    assert assembly.expansion_drafter is not None

    for runner in (assembly.target, assembly.drafter):
        assert set(runner._steps) == set(runner.defined)
