"""The time that a step takes to load is not taken for the time of the iteration that used it first."""

from tests.tiny_pair import TEXT, make_pair
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.models.compiled import BuildClock
from yggdrasil.tree.objective import TreeShape

LOADING_NS = 3_600_000_000_000


class NotingLearner:
    def __init__(self):
        self.milliseconds = []

    def begin(self):
        pass

    def observe(self, promised, accepted):
        pass

    def settle(self, tokens, milliseconds, *, rested):
        self.milliseconds.append(milliseconds)


def test_loading_is_not_settled(monkeypatch):
    policy = FixedPolicy(TreeShape(2, 2, 4))
    policy.learner = NotingLearner()
    decoder = make_pair().decoder(policy)
    runner = decoder.assembly.target
    build = runner.step
    loaded = set()

    def step(name, width):
        if (name, width) not in loaded:  # an hour passes, on the clock of loading alone
            loaded.add((name, width))
            BuildClock.ns += LOADING_NS
        return build(name, width)

    monkeypatch.setattr(runner, "step", step)
    monkeypatch.setattr(BuildClock, "ns", 0)
    decoder.generate(TEXT[:9], max_new_tokens=12)

    first, *others = policy.learner.milliseconds
    assert first < 0  # the hour was taken off an iteration that did not really spend it
    assert min(others) > 0
