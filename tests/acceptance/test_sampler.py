"""What a sampler says of a place down a path is what it says once the path is certain."""

import pytest
import torch

from yggdrasil.acceptance.coins import SeededCoins
from yggdrasil.acceptance.processors import build_processors
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.sampling import SamplingParams

VOCAB, PROMPT, PATH, EOS = 12, [3, 1, 4, 1], [5, 9, 5], 0
SETTINGS = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition by a whole number": {"repetition_penalty": 2},
    "counts": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "bad words": {"bad_words": ((9, 5, 7), (4,))},
    "minimum": {"min_new_tokens": 3},
    "own": {"logits_processors": (lambda ids, scores: scores + 0.3 * ids.sum(),)},
    "grammar": {},
}


class Digits:
    """Stands for a grammar: token t may follow a path where t is not its last token plus its length."""

    def mask(self, path, vocab_size):
        return torch.arange(vocab_size) != (sum(path[-1:]) + len(path)) % vocab_size


def sampler_of(setting):
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, **SETTINGS[setting])
    processors = build_processors(params, len(PROMPT), [EOS], [word for word in params.bad_words if len(word) > 1])
    grammar = Digits() if setting == "grammar" else None
    return Sampler(params, PROMPT, processors, SeededCoins(1), 20, eos=frozenset([EOS]), grammar=grammar)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_place_down_a_path_is_judged_as_if_the_path_were_certain(setting):
    rows = torch.randn(len(PATH) + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    ahead, certain = sampler_of(setting), sampler_of(setting)
    seen = [ahead.scores(row, PATH[:i]) for i, row in enumerate(rows)]
    laws = [ahead.distribution(row, PATH[:i]) for i, row in enumerate(rows)]

    for i, row in enumerate(rows):
        assert torch.equal(seen[i], certain.scores(row))
        assert (laws[i] == certain.distribution(row)).all()
        if i < len(PATH):
            certain.push(PATH[i], row)
    assert not torch.equal(seen[-1], ahead.scores(rows[-1])), "the path makes no difference here"
    assert ahead.tokens == []


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_a_margin_is_what_the_models_logits_may_move_by(temperature):
    """In the units of the tolerance, whatever the temperature."""
    params = SamplingParams(temperature=temperature, seed=4)
    sampler = Sampler(params, PROMPT, build_processors(params, len(PROMPT), (), ()), SeededCoins(4), 20)
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    choice = sampler.choose(row)

    def token_after(fall):
        moved = row.clone()
        moved[choice.token] -= fall
        return sampler.choose(moved).token

    assert token_after(0.999 * choice.margin) == choice.token != token_after(1.001 * choice.margin)


def test_the_one_best_token_is_not_drawn_where_several_tie():
    """Greedy decoding takes the first of them, and so does ``top_k`` 1 at any temperature."""
    drawn = SamplingParams(temperature=1.0, top_k=1, seed=3)
    assert drawn.is_greedy
    assert drawn.identity() == SamplingParams().identity()
    assert not SamplingParams(temperature=1.0, top_k=2).is_greedy
