"""What other weights change is told of what a plan guesses with: a chain of its model, or a tree that costs no pass."""

import pytest
from tiny_pair import SHAPES, TEXT, byte_tokenizer, make_pair

from yggdrasil.calibration import weights_effect as effect
from yggdrasil.calibration.settings import PairSource
from yggdrasil.drafters.options import CountsOptions
from yggdrasil.drafters.statistics.drafter import usual_counts
from yggdrasil.engine.assembly import assemble


@pytest.mark.parametrize(
    ("drafter", "free", "figure"),
    [("a model", (), "AAL of the chain"), (None, (CountsOptions(table=False),), "AAL of the tree"), (None, (), None)],
)
def test_figures_are_of_what_the_plan_guesses_with(monkeypatch, drafter, free, figure):
    """Of a plan without a draft model verification was said to take no time, and to give one token."""
    pair = make_pair()

    def build(source):
        return assemble(
            pair.target, drafter and pair.drafter, source.shapes, "eager", free=usual_counts() if free else None
        )

    monkeypatch.setattr(effect, "build_assembly", build)
    monkeypatch.setattr(effect, "load_tokenizer", lambda _: byte_tokenizer())
    source = PairSource("tiny", drafter, "float32", 1, 1, SHAPES, free=free)
    prompts = [[*TEXT[:12], *TEXT[:12], *TEXT[:6]], list(TEXT[20:40])]

    table = effect.weights_effect(source, "q8_0", prompts, 24, lambda _: lambda _: None).set_index("figure")

    assert [name for name in table.index if "AAL" in name] == ([figure] if figure else [])
    assert (table["full"] > 0).all(), table
    if figure:
        assert table.loc[figure, "full"] > 1.0
