"""One native call chooses the token that processors and coins choose, or leaves the choice to them."""

import numpy as np
import pytest
import torch

from yggdrasil.acceptance.coins import Choice, SeededCoins
from yggdrasil.acceptance.processors import build_processors
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native

pytestmark = pytest.mark.skipif(not is_native(), reason="the native library is not there")
PROMPT = [1, 2, 3]
SETTINGS = [
    {},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.5},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
]


class Counted(SeededCoins):
    """Counts the choices by whether the native call made them."""

    def __init__(self, seed):
        super().__init__(seed)
        self.native = self.left = 0

    def choose(self, logits, params, position):
        found = super().choose(logits, params, position)
        self.native, self.left = self.native + (found is not None), self.left + (found is None)
        return found


class Slow(SeededCoins):
    def choose(self, logits, params, position):
        return None


def sampler_of(params, coins, position=0):
    prompt = PROMPT + [5] * position
    return Sampler(params, prompt, build_processors(params, len(prompt), [], []), coins, 100)


def made_up_logits(size, spread, seed, dtype):
    random = np.random.default_rng(seed)
    logits = spread * random.standard_normal(size).astype(np.float32)
    if seed % 3 == 0:  # most tokens are impossible
        logits[random.random(size) < 0.9] = -np.inf
        logits[random.integers(size)] = 0.0
    return torch.from_numpy(logits).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 64, 1000, 30001])
@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0, 30.0])
def test_the_choice_is_that_of_processors_and_coins(dtype, size, spread):
    fast = Counted(7)
    for number, setting in enumerate(SETTINGS):
        for position in range(6):
            params = SamplingParams(temperature=(0.3, 0.7, 1.0, 1.6)[(number + position) % 4], **setting)
            logits = made_up_logits(size, spread, position, dtype)
            found, wanted = (sampler_of(params, coins, position).choose(logits) for coins in (fast, Slow(7)))
            assert found.token == wanted.token, (setting, position)
            assert found.margin == pytest.approx(wanted.margin, rel=1e-3, abs=1e-3)
    assert fast.native > fast.left


@pytest.mark.parametrize("setting", SETTINGS)
def test_nearly_all_choices_among_usual_logits_are_native(setting):
    fast = Counted(3)
    params = SamplingParams(temperature=0.8, **setting)
    for seed in range(1, 300, 3):
        sampler_of(params, fast, seed % 50).choose(made_up_logits(5000, 3.0, seed, torch.bfloat16))
    assert fast.native >= 97


def test_equal_scores_are_kept_or_left_out_together():
    logits = torch.tensor([4.0, 4.0, 2.0, 2.0, 2.0, -1.0])
    drawn = {}
    for name, setting in {"top_k": {"top_k": 3}, "top_p": {"top_p": 0.9}, "one": {"top_p": 0.1}}.items():
        params = SamplingParams(temperature=1.0, **setting)
        drawn[name] = {sampler_of(params, Counted(seed)).choose(logits).token for seed in range(300)}
    assert drawn == {"top_k": {0, 1, 2, 3, 4}, "top_p": {0, 1, 2, 3, 4}, "one": {0, 1}}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_left_to_the_sampler(value):
    logits = torch.zeros(100)
    logits[70] = value
    coins = Counted(1)
    with pytest.raises(YggdrasilError, match="the scores to choose from are not finite"):
        sampler_of(SamplingParams(temperature=1.0), coins).choose(logits)
    with pytest.raises(YggdrasilError, match="no token may follow"):
        sampler_of(SamplingParams(temperature=1.0), coins).choose(torch.full((100,), -torch.inf))
    assert coins.left == 2


@pytest.mark.parametrize("setting", [{"top_p": 0.5}, {"min_p": 0.5}])
def test_what_rounding_might_decide_is_left_to_the_sampler(setting):
    """The second token's probability, or the first's share, is the limit itself."""
    logits = torch.tensor([0.0, 0.0]) if "top_p" in setting else torch.tensor([2.0, 1.0]).log()
    params = SamplingParams(temperature=1.0, **setting)
    coins = Counted(2)
    for position in range(20):
        sampler_of(params, coins, position).choose(torch.cat([logits, logits - 9e-6]))
    assert coins.left > 0


def test_penalties_come_before_the_native_call():
    params = SamplingParams(temperature=1.0, logit_bias={4: 50.0})
    coins = Counted(1)
    assert sampler_of(params, coins).choose(torch.zeros(100, dtype=torch.bfloat16)).token == 4
    assert coins.native == 1


def test_greedy_requests_and_typical_p_do_not_use_it():
    for params in (SamplingParams(logprobs=1), SamplingParams(temperature=1.0, typical_p=0.5)):
        coins = Counted(1)
        assert isinstance(sampler_of(params, coins).choose(torch.arange(100.0)), Choice)
        assert coins.native == coins.left == 0
