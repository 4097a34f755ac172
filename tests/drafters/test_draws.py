"""Counts draft what the target will draw: its noise is known beforehand, and what is drafted never changes the draw."""

import numpy as np
import pytest
import torch
from tiny_pair import TEXT, make_pair

from yggdrasil import SamplingParams
from yggdrasil.acceptance.coins import SeededCoins
from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter, default_statistics
from yggdrasil.drafters.statistics.draws import NO_DRAWS, Draws
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.native import is_native
from yggdrasil.policy.fixed import ModelFreePolicy
from yggdrasil.tree.token_tree import TokenTree

PROMPT = TEXT[:24]


def test_the_best_candidate_is_the_token_that_is_drawn():
    """With the target's own probabilities and all of the noise."""
    generator = np.random.default_rng(0)
    for seed, position in ((3, 10), (2**63 + 5, 4000)):
        draws = Draws.of(seed, 1.0)._replace(noise=1.0)
        for law in generator.dirichlet(np.ones(9), 20):
            reweighed = draws.reweigh(list(zip(range(50, 59), law.tolist(), strict=True)), position)
            scores = np.full(80, -np.inf)
            scores[50:59] = np.log(law)
            drawn = SeededCoins(seed).at(position, "target").draw(scores).token
            assert max(reweighed, key=lambda each: each[1])[0] == drawn
            assert sum(probability for _, probability in reweighed) < 1


def test_less_noise_where_it_is_colder_and_none_of_a_greedy_target():
    cold, warm, hot = (Draws.of(1, temperature) for temperature in (0.1, 1.0, 100.0))

    assert cold.noise < 0.05 < 0.5 < warm.noise < hot.noise <= 1.0
    assert cold.others < 0.01 < warm.others < hot.others < 10
    assert NO_DRAWS.noise == 0


@pytest.mark.skipif(not is_native(), reason="no compiler here")
@pytest.mark.parametrize("pooled", [False, True])
def test_native_trees_are_those_of_python_at_every_position(pooled):
    generator = np.random.default_rng(1)
    weights = NGramScorer(**{name: generator.normal(scale=0.7, size=shape) for name, shape in SHAPES.items()})
    texts = [generator.integers(0, 5, 60).tolist() for _ in range(2)]
    grown = []
    for native in (True, False):
        drafter, trees = StatisticsDrafter(weights, native=native), []
        drafter.is_public_pool = pooled
        for text in texts:
            drafter.begin(text[:50])
            drafter.follow_draws(7, 1.0)
            for token in text[50:]:
                tree = TokenTree.on_host(12)
                drafter.propose(tree, Budget(5))
                drafter.propose(tree, Budget(5, is_first=False))
                trees.append(tree)
                drafter.extend([token], {})
        grown.append(trees)
    for key in (None, 7):
        drafter.follow_draws(key, 1.0)
        drafter.propose(last := TokenTree.on_host(12), Budget(5))
        grown.append(last.scores)

    for ours, theirs in zip(*grown[:2], strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(grown[2], grown[3])


def test_requests_tell_their_seed_and_positions_and_keep_their_tokens():
    """Positions are those of the request's text, also where the counts have an earlier one."""
    counts = default_statistics()
    counts.is_public_pool = True
    decoder = make_pair().decoder(ModelFreePolicy(8), drafter=None, model_free=counts)
    roots, grow = [], counts._make.grow
    for prompt, seed in ((PROMPT, 5), (TEXT[3:30], 6)):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        alone = decoder.generate(prompt, max_new_tokens=12, sampling=sampling, speculation=False)
        roots.clear()
        counts._counts.grow = lambda *given: (roots.append(given[2]), grow(counts._counts, *given))[1]
        ours = decoder.generate(prompt, max_new_tokens=12, sampling=sampling)
        assert ours.tokens == alone.tokens
        assert counts._draws == Draws.of(seed, 1.0)
        assert roots == sorted(roots)
        assert roots[0] == len(prompt)  # of the first token, which is drawn before anything is drafted
        assert roots[-1] < len(prompt) + 12
    decoder.generate(PROMPT, max_new_tokens=4)
    assert counts._draws == NO_DRAWS
