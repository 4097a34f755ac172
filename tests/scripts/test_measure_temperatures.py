"""Times of a text's beginning and of what follows it, both ways over the same tokens."""

import importlib
from types import ModuleType

import pytest
from tiny_pair import TEXT

from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.prompts import Prompt
from yggdrasil.tree.objective import TreeShape


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("measure_temperatures")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_ways_write_the_same_and_are_parted_at_the_border(script, pair, temperature):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    for number in (0, 1):
        plain, ours = script._both(decoder, TEXT[:9], temperature, number, 8, 20)

        assert plain.tokens == ours.tokens
        assert len(plain.tokens) == 20
        assert (plain.beginning[1], plain.rest[1]) == (7, 12), "the first token is the prompt's"
        assert ours.beginning[1] + ours.rest[1] == 19
        assert 7 <= ours.beginning[1] <= 9, "an iteration may go past the border"
        assert min(plain.beginning[0], plain.rest[0], ours.beginning[0], ours.rest[0]) > 0.0


def test_ratios_are_of_times_a_token_of_all_prompts_together(script):
    """Plain 2 ms a token; ours 12 ms for 10 and 8 for 6, which is 1.25."""
    assert script._over_plain([((20.0, 10), (12.0, 10)), ((12.0, 6), (8.0, 6))]) == pytest.approx(1.25 / 2)


def test_prompts_are_taken_from_all_parts_of_a_file(script):
    prompts = [Prompt(str(number), "text") for number in range(10)]

    assert [prompt.id for prompt in script._evenly(prompts, 4)] == ["0", "2", "5", "7"]
    assert script._evenly(prompts, 99) == prompts
