"""An iteration that loaded a step is not held against speculation: it will not load it again."""

from tests.tiny_pair import TEXT, make_pair
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.models.compiled import BuildClock
from yggdrasil.tree.objective import TreeShape

LOADING_NS = 1


class NotingLearner:
    def __init__(self):
        self.milliseconds, self.promises = [], KeptPromises()

    def begin(self):
        pass

    def look_up(self, repeated, room, context):
        return None

    def settle(self, decision, tokens, milliseconds, *, rested):
        self.milliseconds.append(milliseconds)


def test_loading_is_not_settled(monkeypatch):
    policy = FixedPolicy(TreeShape(2, 2, 4))
    policy.learner = NotingLearner()
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
    assert len(policy.learner.milliseconds) == sum(iterations) - 1
