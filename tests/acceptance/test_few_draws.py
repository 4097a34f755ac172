"""A draw computes the noise of few tokens, and takes the token that the noise of all tokens would give."""

import numpy as np
import pytest
import torch

from yggdrasil.acceptance.coins import Coins, best_of, draw_key
from yggdrasil.native import is_native
from yggdrasil.native.portable import likely_draws
from yggdrasil.native.random_numbers import gumbel_noise


def made_up_scores(size, spread, seed):
    random = np.random.default_rng(seed)
    scores = spread * random.standard_normal(size).astype(np.float32)
    if seed % 3 == 0:  # most tokens are impossible
        scores[random.random(size) < 0.9] = -np.inf
        scores[random.integers(size)] = 0.0
    return scores


@pytest.mark.parametrize("size", [1, 2, 17, 1000, 30001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0, 1e4])
def test_the_token_and_its_lead_are_those_of_the_whole_vocabulary(size, spread):
    for position in range(24):
        scores = made_up_scores(size, spread, position)
        noise = gumbel_noise(torch.tensor([draw_key(5)]), torch.tensor([position]), torch.arange(size)).numpy()
        wanted = best_of(scores + noise)
        found = Coins(5, position, "target").draw(scores)
        assert found.token == wanted.token
        assert found.margin == pytest.approx(wanted.margin, rel=1e-4, abs=1e-4)


@pytest.mark.skipif(not is_native(), reason="the portable operator leaves no token out")
def test_few_tokens_are_left():
    scores = torch.from_numpy(made_up_scores(50_000, 2.0, 1))
    tokens, others = torch.empty(2, 50_000, dtype=torch.int64)
    count = torch.ops.yggdrasil.likely_draws(scores, draw_key(5), 3, tokens)
    assert 2 <= count < 100
    assert likely_draws(scores, draw_key(5), 3, others) == 50_000
    assert set(tokens[:count].tolist()) <= set(others.tolist())


def test_impossible_tokens_are_never_drawn():
    scores = np.full(1000, -np.inf, dtype=np.float32)
    scores[[3, 700]] = -5.0, -4.0
    drawn = {Coins(seed, 0, "target").draw(scores).token for seed in range(60)}
    assert drawn == {3, 700}
