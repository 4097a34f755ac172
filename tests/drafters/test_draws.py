"""Counts draft what the target will draw: its noise is known beforehand, and what is drafted never changes the draw."""

import numpy as np
import pytest
from laws import likelihoods, reweigh
from tiny_pair import TEXT, make_pair

from yggdrasil import SamplingParams
from yggdrasil.acceptance.coins import SeededCoins
from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter, default_statistics
from yggdrasil.drafters.statistics.draws import NO_DRAWS, Draws
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.policy.fixed import ModelFreePolicy
from yggdrasil.tree.token_tree import TokenTree

PROMPT = TEXT[:24]


def test_the_best_candidate_is_the_token_that_is_drawn():
    """With the target's own probabilities and all of the noise."""
    generator = np.random.default_rng(0)
    for seed, position in ((3, 10), (2**63 + 5, 4000)):
        draws = Draws.of(seed, 1.0)._replace(noise=1.0)
        for law in generator.dirichlet(np.ones(9), 20):
            reweighed = reweigh(draws, dict(zip(range(50, 59), law.tolist(), strict=True)), position)
            scores = np.full(80, -np.inf)
            scores[50:59] = np.log(law)
            drawn = SeededCoins(seed).at(position, "target").draw(scores).token
            assert max(reweighed, key=reweighed.__getitem__) == drawn
            assert sum(reweighed.values()) < 1


def test_less_noise_where_it_is_colder_and_none_of_a_greedy_target():
    cold, warm, hot = (Draws.of(1, temperature) for temperature in (0.1, 1.0, 100.0))

    assert cold.noise < 0.05 < 0.5 < warm.noise < hot.noise <= 1.0
    assert cold.others < 0.01 < warm.others < hot.others < 10
    assert NO_DRAWS.noise == 0


@pytest.mark.parametrize("pooled", [False, True])
def test_candidates_have_the_noise_of_their_positions(pooled):
    """At every position of two texts, of nodes on two levels."""
    generator = np.random.default_rng(1)
    weights = NGramScorer(**{name: generator.normal(scale=0.7, size=shape) for name, shape in SHAPES.items()})
    drafter, draws = StatisticsDrafter(weights), Draws.of(7, 1.0)
    drafter.is_public_pool = pooled
    for text in (generator.integers(0, 5, 60).tolist() for _ in range(2)):
        drafter.begin(text[:50])
        drafter.follow_draws(7, 1.0)
        for position, token in enumerate(text[50:], 50):
            drafter.propose(tree := TokenTree.on_host(30), Budget(2))
            for path, children in children_of(tree).items():
                counted = drafter.features(path)
                wanted = reweigh(draws, likelihoods(weights, counted), position + len(path))
                best = max(wanted, key=wanted.__getitem__)
                assert children[best] == pytest.approx(min(wanted[best], 0.98), rel=1e-3)
            drafter.extend([token], {})


def children_of(tree):
    """Return the probability of each child, given its parent, by the parent's path of tokens."""
    paths, children = {0: ()}, {}
    for node in range(1, tree.size):
        above = paths[int(tree.parents[node])]
        paths[node] = (*above, int(tree.tokens[node]))
        children.setdefault(above, {})[paths[node][-1]] = float(tree.edges[node].exp())
    return children


def test_requests_tell_their_seed_and_positions_and_keep_their_tokens():
    """Positions are those of the request's text, also where the counts have an earlier one."""
    counts = default_statistics()
    counts.is_public_pool = True
    decoder = make_pair().decoder(ModelFreePolicy(8), drafter=None, model_free=counts)
    roots, grow = [], counts._counts.grow
    for prompt, seed in ((PROMPT, 5), (TEXT[3:30], 6)):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        alone = decoder.generate(prompt, max_new_tokens=12, sampling=sampling, speculation=False)
        roots.clear()
        counts._counts.grow = lambda *given: (roots.append(given[2]), grow(*given))[1]
        ours = decoder.generate(prompt, max_new_tokens=12, sampling=sampling)
        assert ours.tokens == alone.tokens
        assert counts._draws == Draws.of(seed, 1.0)
        assert roots == sorted(roots)
        assert roots[0] == len(prompt)  # of the first token, which is drawn before anything is drafted
        assert roots[-1] < len(prompt) + 12
    decoder.generate(PROMPT, max_new_tokens=4)
    assert counts._draws == NO_DRAWS
