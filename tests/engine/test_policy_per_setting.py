"""What pays at one sampling setting may not at another: each has a policy of its own, which begins as new."""

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT as MATCH
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.engine.host_acceptance import PolicyPerSetting
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape


class Learning(FixedPolicy):
    def __init__(self):
        super().__init__(TreeShape(1, 2, 4))
        self.lessons = 0


def test_each_setting_keeps_what_it_learned():
    policies, policy = PolicyPerSetting(), Learning()
    policies.policy_for(policy, GREEDY, MATCH).lessons += 1
    warm = policies.policy_for(policy, SamplingParams(temperature=0.8, seed=1), MATCH)

    assert policies.policy_for(policy, GREEDY, MATCH) is policy
    assert warm.lessons == 0  # nothing that was learned when greedy
    assert policies.policy_for(policy, SamplingParams(temperature=0.8, seed=2), MATCH) is warm
    assert policies.policy_for(policy, SamplingParams(temperature=0.8), Speculation(rule="sequoia")) is not warm
    fixed = Speculation(exactness="fixed-width", fixed_width=4)
    assert policies.policy_for(policy, GREEDY, fixed) is not policy  # every pass has the price of that width
    assert policies.policy_for(policy, GREEDY, Speculation(exactness="strict")) is policy


def test_policies_that_take_turns_keep_their_own():
    policies, one, other = PolicyPerSetting(), Learning(), Learning()
    sampling = SamplingParams(temperature=0.8)
    first, second = policies.policy_for(one, sampling, MATCH), policies.policy_for(other, sampling, MATCH)

    assert first is not second
    assert policies.policy_for(one, sampling, MATCH) is first


def test_the_settings_used_last_are_kept():
    policies, policy = PolicyPerSetting(), Learning()
    warm, hot = SamplingParams(temperature=0.5), SamplingParams(temperature=0.6)
    first, other = policies.policy_for(policy, warm, MATCH), policies.policy_for(policy, hot, MATCH)
    for i in range(70):
        policies.policy_for(policy, SamplingParams(temperature=1 + i / 100), MATCH)
        assert policies.policy_for(policy, warm, MATCH) is first

    assert policies.policy_for(policy, hot, MATCH) is not other
