"""Acceptance rules of a user's own: an object in Python, ``module:Class`` in commands."""

import pytest
from tiny_pair import TEXT, make_pair
from typer.testing import CliRunner

from yggdrasil.acceptance.rules import MatchRule, Walk
from yggdrasil.acceptance.speculation import Speculation, own_rule
from yggdrasil.cli.app import make_app
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape


class Exact:
    """What the default rule does, counting its trees."""

    name, is_lossless = "exact", True

    def __init__(self):
        self.num_trees = 0

    def walk(self, tree, sampler):
        self.num_trees += 1
        return MatchRule().walk(tree, sampler)


class Lossy(Exact):
    """The same rule, which does not claim to keep the target's law."""

    name, is_lossless = "lossy", False


class Nothing:
    """No rule."""


@pytest.mark.parametrize("kind", [Exact, Lossy])
@pytest.mark.parametrize("options", [{}, {"expansion": (2, 1)}])
def test_an_own_rule_accepts(options, kind):
    pair, rule = make_pair(), kind()
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)))
    generation = decoder.generate(TEXT[:20], max_new_tokens=30, speculation=Speculation(rule=rule, **options))

    assert generation.tokens == pair.reference(TEXT[:20], 30)
    assert 0 < generation.metrics.iterations <= rule.num_trees
    assert (generation.metrics.decoding.rule, generation.metrics.decoding.lossless) == (kind.name, kind.is_lossless)


class Returning:
    """Pushes the target's choice, and returns the result of ``given`` for it."""

    name, is_lossless = "returning", False

    def __init__(self, given):
        self.given = given

    def walk(self, tree, sampler):
        token = sampler.choose(tree.logits[0]).token
        sampler.push(token, tree.logits[0])
        return self.given(token)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda _: None, "NoneType, not a Walk"),
        (lambda token: ([0], [token]), "tuple, not a Walk"),
        (lambda _: Walk([0], []), "1 rows and 0 tokens"),
        (lambda token: Walk([], []), "0 rows and 0 tokens"),
        (lambda token: Walk([3], [token]), "row 0 first"),
        (lambda token: Walk([0, 9999], [token, 5]), "no path of the tree"),
        (lambda token: Walk([0], [token + 1]), "pushed"),
        (lambda _: Walk([0], [10**9]), "pushed"),
    ],
)
def test_what_is_no_walk_is_refused_by_the_rules_name(given, said):
    decoder = make_pair().decoder(FixedPolicy(TreeShape(4, 3, 8)))
    rule = Returning(given)
    with pytest.raises(YggdrasilError, match=f"the acceptance rule returning returned .*{said}"):
        decoder.generate(TEXT[:20], max_new_tokens=9, speculation=Speculation(rule=rule, expansion=(2, 1)))


def test_it_is_named_by_module_and_class():
    assert isinstance(own_rule(f"{__name__}:Exact"), Exact)
    for rule, message in (
        ("nosuch", "none of match"), ("no_such_module:Rule", "cannot be imported"),
        (f"{__name__}:Nothing", "lacks name, is_lossless or walk"), (f"{__name__}:TEXT", "is no class"),
    ):  # fmt: skip
        result = CliRunner().invoke(make_app(), ["generate", "model", "--prompt", "a", "--rule", rule])
        assert message in str(result.exception)
    with pytest.raises(YggdrasilError, match="rule"):
        Speculation(rule=Nothing())
