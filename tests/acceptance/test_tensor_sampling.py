"""Sampling by tensor code against the host's sampler, and the generator of random numbers that both draw from."""

import numpy as np
import pytest
import torch
from scipy import stats

from yggdrasil.acceptance.coins import SeededCoins, draw_key
from yggdrasil.acceptance.processors import build_processors
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.tensor_sampling import SamplingTensors, counts_on_path, draw, kind_on_device, process
from yggdrasil.native.random_numbers import _uniform, gumbel_noise, random_words, uniform_number

SIZE, PROMPT, PATH = 300, [5, 9, 9, 40], [7, 40, 7]
ENDS = range(0, SIZE, 2)
SETTINGS = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 30.0},
    "top-k": {"temperature": 2.0, "top_k": 7},
    "top-p": {"temperature": 2.0, "top_p": 0.6},
    "both, and min-p": {"temperature": 3.0, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
    "min-p": {"temperature": 5.0, "min_p": 0.3},
    "one token": {"temperature": 9.0, "top_p": 1e-6},
    "penalties": {"temperature": 1.5, "repetition_penalty": 2.5, "presence_penalty": 3.0, "frequency_penalty": 4.0},
    "greedy with a bias and penalties": {"logit_bias": {7: 4.0, 3: -9.0}, "frequency_penalty": 2.0},
    "typical-p": {"temperature": 2.0, "typical_p": 0.6},
    "typical-p among few": {"temperature": 3.0, "top_k": 40, "min_p": 0.05, "typical_p": 0.7},
    "a minimum length": {"temperature": 9.0, "min_new_tokens": 4},
    "all of them": {
        "temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "logit_bias": {8: 5.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_the_host_samplers(options):
    """Behind a prompt, a generated token and a path of the tree, for every row of a path."""
    params = SamplingParams(**options)
    kind = kind_on_device(params)
    tensors = SamplingTensors(SIZE, torch.device("cpu"))
    tokens = torch.tensor([11, *PATH])  # the root, counted already, and the path below it
    ancestors = torch.ones(4, 4, dtype=torch.bool).tril()
    found = []
    for turn in range(40):
        seed = 2**64 - 1 - turn
        tensors.begin(params, seed, PROMPT, eos=ENDS)
        tensors.count(torch.tensor([11, 11, 12]), torch.tensor([True, True, False]))
        logits = 3 * torch.randn(4, SIZE, generator=torch.Generator().manual_seed(turn))
        sampler = Sampler(params, PROMPT, build_processors(params, len(PROMPT), ENDS, ()), SeededCoins(seed), 20)
        for token in (11, 11):
            sampler.push(token, logits[0])
        expected = []
        for row, token in zip(logits, [*PATH, 0], strict=True):
            expected.append(sampler.choose(row).token)
            sampler.push(token, row)
        positions = torch.arange(4) + len(PROMPT) + 2
        scores = process(kind, logits, counts_on_path(tokens, ancestors, SIZE), positions, tensors.inputs)
        ours = draw(scores, positions, tensors.inputs)
        assert ours.tolist() == expected
        found += expected
    assert len(set(found)) > 20


def test_the_host_serves_what_needs_logits_there():
    assert kind_on_device(SamplingParams(logits_processors=(print,))) is None


def test_numbers_are_those_of_splitmix64():
    """The first outputs of its published reference from the seed 1234567."""
    words = random_words(torch.tensor([1234567]), torch.arange(3))

    assert [word % 2**64 for word in words.tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def test_noise_follows_its_law_along_tokens_positions_and_seeds():
    keys = torch.tensor([draw_key(seed) for seed in range(300)])
    line, one = torch.arange(50_000), torch.tensor([3])

    for arguments in ((keys[:1], one, line), (keys[:1], line, one), (keys, one, torch.arange(100)[:, None])):
        assert stats.kstest(gumbel_noise(*arguments).flatten().numpy(), "gumbel_r").pvalue > 0.01
    uniform = [uniform_number(draw_key(seed, "target", 1), 3) for seed in range(1000)]
    assert stats.kstest(uniform, "uniform").pvalue > 0.01


def test_draws_and_flips_of_one_place_are_independent():
    scores = np.zeros(20)
    table = np.zeros((20, 20))
    for seed in range(4000):
        coins = SeededCoins(seed).at(4, "target")
        table[coins.draw(scores).token, coins.draw(scores).token] += 1

    assert stats.chi2_contingency(table).pvalue > 0.01


def test_the_largest_word_gives_a_number_below_one():
    words = torch.tensor([-1, 0])

    largest, least = _uniform(words, torch.float64).tolist()

    assert 0.0 < least < 2.0**-52
    assert 1.0 - 2.0**-52 < largest < 1.0


def test_tokens_are_counted_on_a_rows_own_path_without_the_root():
    tokens = torch.tensor([7, 3, 3, 5])  # root; its child; the child's child; the root's second child
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)

    counts = counts_on_path(tokens, ancestors, 8)

    assert counts[:, [3, 5, 7]].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0]]
    assert counts.sum() == 4
