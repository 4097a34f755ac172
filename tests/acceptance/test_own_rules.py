"""Acceptance rules of a user's own: an object in Python, ``module:Class`` in commands."""

import pytest
from tiny_pair import TEXT, make_pair
from typer.testing import CliRunner

from yggdrasil.acceptance.rules import MatchRule
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
