"""The joint law of three tokens under every rule is the target's own: by enumeration, and by chi-square on real coins.

An iteration's outcomes are enumerated after every prefix and put together: coins of different places are independent.
"""

from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from acceptance.enumeration import distance, exact_law
from scipy import stats

from yggdrasil.acceptance.coins import SeededCoins
from yggdrasil.acceptance.drawn import DrawKind, DrawnTree, NodeDraws, draw_children
from yggdrasil.acceptance.processors import build_processors
from yggdrasil.acceptance.rules import DRAWN_KINDS, DrawnRule, MatchRule, TypicalRule
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.verified import VerifiedTree
from yggdrasil.errors import YggdrasilError

VOCAB, COUNT = 3, 3
SAMPLED = SamplingParams(temperature=1.0)
DRAFTERS = ("target", "uniform", "adversarial", "zeros")
TREES = {"leviathan": (1, 1), "specinfer": (2, 1), "sequoia": (2, 1)}


def check_draws(draws: NodeDraws, kind: DrawKind) -> None:
    """Assert what the rules rely on."""
    assert np.isclose(draws.weights.sum(), 1.0), "weights are not a distribution"
    assert all(draws.weights[token] > 0 for token in draws.tokens), "a token was drawn that has no probability"
    assert kind != "chain" or len(draws.tokens) <= 1, "a chain has one child a node"
    assert kind == "with replacement" or len(set(draws.tokens)) == len(draws.tokens), "a token was drawn twice"


@cache
def target_row(prefix):
    """Logits [V] after a prefix: any function of it will do."""
    generator = torch.Generator().manual_seed(1 + sum((token + 1) * 7**i for i, token in enumerate(prefix)))
    return 1.5 * torch.randn(VOCAB, generator=generator)


def target_law(prefix):
    return target_row(prefix).double().softmax(-1).numpy()


def draft_law(kind, prefix):
    law = target_law(prefix)
    if kind == "uniform":
        return np.full(VOCAB, 1 / VOCAB)
    if kind == "adversarial":  # nearly all on the target's least likely
        guess = np.full(VOCAB, 0.05)
        guess[law.argmin()] = 0.9
        return guess / guess.sum()
    if kind == "zeros":  # the target's likeliest is impossible
        guess = np.where(np.arange(VOCAB) == law.argmax(), 0.0, 1.0)
        return guess / guess.sum()
    return law


def expected_law():
    law = Counter()
    for tokens in product(range(VOCAB), repeat=COUNT):
        law[tokens] = float(np.prod([target_law(tokens[:i])[token] for i, token in enumerate(tokens)]))
    return law


def grow(prefix, drafter, expansion, kind, coins):
    """A verified tree over the toy target, drawn (``kind``) or with the drafter's likeliest children."""
    tokens, parents, paths = [0], [0], [()]
    drawn = DrawnTree(kind) if kind else None
    frontier = [0]
    for count in expansion:
        attached = []
        for node in frontier:
            law = draft_law(drafter, (*prefix, *paths[node]))
            if drawn is None:
                children = np.argsort(-law, kind="stable")[:count].tolist()
            else:
                drawn.draws[node] = draws = draw_children(law, count, kind, coins)
                check_draws(draws, kind)
                children = list(dict.fromkeys(draws.tokens))
            for token in children:
                attached.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                paths.append((*paths[node], token))
        frontier = attached
    logits = torch.stack([target_row((*prefix, *path)) for path in paths])
    rows = range(len(tokens))
    return VerifiedTree.of([rows, tokens, parents, [1] * len(tokens)], logits, drawn)


def iterate(coins, rule, drafter, expansion, kind=None, prefix=()):
    """The tokens that one iteration makes certain after ``prefix``."""
    sampler = Sampler(SAMPLED, [0, *prefix], build_processors(SAMPLED, 1, (), ()), coins, 20)
    tree = grow(prefix, drafter, expansion, kind, sampler.coins("draft"))
    walk = rule.walk(tree, sampler)
    assert walk.tokens == sampler.tokens
    assert len(walk.rows) == len(walk.tokens)
    return tuple(walk.tokens)


def joint_law(rule, drafter, expansion, kind=None, prefix=()):
    """Exact law of the first three tokens; iterations after the first verify one level, which keeps this small."""
    if len(prefix) >= COUNT:
        return Counter({prefix[:COUNT]: 1.0})
    law = Counter()
    outcomes = exact_law(lambda coins: iterate(coins, rule, drafter, expansion, kind, prefix))
    for tokens, probability in outcomes.items():
        for text, rest in later_law(rule, drafter, expansion[:1], kind, (*prefix, *tokens)).items():
            law[text] += probability * rest
    return law


def later_law(rule, drafter, expansion, kind, prefix):
    key = (rule if isinstance(rule, DrawnRule) else type(rule).__name__, drafter, expansion, kind, prefix[:COUNT])
    if key not in _later:
        _later[key] = joint_law(rule, drafter, expansion, kind, prefix)
    return _later[key]


_later = {}


def decode(coins, rule, drafter, expansion, kind=None):
    """Three tokens, by as many iterations as it takes."""
    tokens = ()
    while len(tokens) < COUNT:
        tokens += iterate(coins, rule, drafter, expansion, kind, tokens)
    return tokens[:COUNT]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", TREES)
def test_drawn_candidates_leave_the_law(name, drafter):
    kind = DRAWN_KINDS[name]
    law = joint_law(DrawnRule(name, kind), drafter, TREES[name], kind)

    assert sum(law.values()) == pytest.approx(1)
    assert distance(law, expected_law()) < 1e-6


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("expansion", [(1, 1), (2, 1), (3,)])
def test_matching_on_a_fixed_tree_leaves_the_law(drafter, expansion):
    law = joint_law(MatchRule(), drafter, expansion)

    assert distance(law, expected_law()) < 1e-6


class Mixed:
    """A rule forced on trees it is not for: the guard is taken off, which users cannot do."""

    def __init__(self, rule, kind):
        self._rule, self._kind = rule, kind

    def walk(self, tree, sampler):
        tree.drawn = DrawnTree(self._kind, tree.drawn.draws)
        return self._rule.walk(tree, sampler)


@pytest.mark.filterwarnings("ignore:invalid value")  # a draw that the wrong kind says is impossible
@pytest.mark.parametrize(
    ("name", "kind"), [("specinfer", "without replacement"), ("sequoia", "with replacement")], ids=str
)
def test_a_rule_on_the_wrong_tree_bends_the_law(name, kind):
    """The planted bias: so the enumeration above would notice one."""
    rule = Mixed(DrawnRule(name, DRAWN_KINDS[name]), DRAWN_KINDS[name])
    law = joint_law(rule, "uniform", (2,), kind)

    assert distance(law, expected_law()) > 0.005


def test_a_lossy_rule_bends_the_law():
    law = joint_law(TypicalRule(0.09, 0.3), "uniform", (2, 1))

    assert distance(law, expected_law()) > 0.05


def test_mixing_a_rule_and_a_tree_is_refused():
    rules = {kind: DrawnRule(name, kind) for name, kind in DRAWN_KINDS.items()}
    for kind in rules:
        for other in (None, *rules):
            if other == kind:
                continue
            with pytest.raises(YggdrasilError, match="accepts trees drawn as"):
                decode(SeededCoins(1), rules[kind], "uniform", (1,), other)
        for fixed in (MatchRule(), TypicalRule(0.1, 0.3)):
            with pytest.raises(YggdrasilError, match="is for trees fixed beforehand"):
                decode(SeededCoins(1), fixed, "uniform", (1,), kind)


def test_leaving_out_a_drawn_child_is_refused():
    sampler = Sampler(SAMPLED, [0], build_processors(SAMPLED, 1, (), ()), SeededCoins(3), 20)
    tree = grow((), "uniform", (2,), "without replacement", sampler.coins("draft"))
    tree.children[0].popitem()

    with pytest.raises(AssertionError, match="missing from the verified tree"):
        DrawnRule("sequoia", "without replacement").walk(tree, sampler)


def p_value(rule, drafter, expansion, kind=None, runs=800):
    counts = Counter(decode(SeededCoins(seed), rule, drafter, expansion, kind) for seed in range(runs))
    expected = expected_law()
    keys = sorted(expected)
    return stats.chisquare([counts[key] for key in keys], [runs * expected[key] for key in keys]).pvalue


@pytest.mark.parametrize("name", ["match", *TREES])
def test_seeded_coins_follow_the_law(name):
    """What enumeration cannot see: that the real coins are fair, and independent of each other."""
    rule = MatchRule() if name == "match" else DrawnRule(name, DRAWN_KINDS[name])

    assert p_value(rule, "adversarial", TREES.get(name, (2,))[:1], DRAWN_KINDS.get(name)) > 0.01


def test_the_chi_square_sees_a_bias():
    assert p_value(TypicalRule(0.09, 0.3), "uniform", (2,)) < 1e-6
    assert p_value(LikeliestAsDrawn(), "target", (1,)) < 1e-6


class LikeliestAsDrawn:
    """The fault often seen: the drafter's best token, tested with p / q as if it had been drawn."""

    def walk(self, tree, sampler):
        draws = NodeDraws((next(iter(tree.children[0])),), target_law(()))
        tree.drawn = DrawnTree("chain", {0: draws})
        return DrawnRule("leviathan", "chain").walk(tree, sampler)


def test_coins_depend_on_seed_place_and_purpose_alone():
    scores = np.zeros(50)
    draws = {
        (seed, place, purpose): [SeededCoins(seed).at(place, purpose).draw(scores).token for _ in range(2)]
        for seed, place, purpose in product((1, 2), (5, 6), ("target", "draft"))
    }

    assert all(first == second for first, second in draws.values())
    assert len({first for first, _ in draws.values()}) > 4
