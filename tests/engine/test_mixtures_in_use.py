"""Mixtures, sinks and Gemma 4 in use: later turns of a chat and captured passes, against transformers' decoding."""

import pytest
from mixtures import MIXTURES, mixture_model
from no_waiting import refuse_waiting
from tiny_pair import TEXT

from yggdrasil import SamplingParams
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:21]
families = pytest.mark.parametrize("family", MIXTURES)


@families
def test_a_later_turn_reads_only_what_is_new(family):
    model = mixture_model(family)
    decoder = model.decoder(FixedPolicy(TreeShape(2, 4, 8)), NGramDrafter())
    text = [*PROMPT, *decoder.generate(PROMPT, max_new_tokens=16).tokens]
    for prompt, new in (([*text, *TEXT[40:45]], 6), ([*PROMPT, *TEXT[50:54]], 5), (PROMPT, 1), (TEXT[30:60], 30)):
        found = decoder.generate(prompt, max_new_tokens=6)
        assert found.tokens == model.reference(prompt, 6)
        assert len(prompt) - found.metrics.reused_tokens <= new


@families
def test_captured_passes_give_the_tokens_without_waiting(family, monkeypatch):
    refuse_waiting(monkeypatch)
    model, drawn = mixture_model(family), SamplingParams(temperature=1.0, seed=5)
    decoder = model.decoder(FixedPolicy(TreeShape(4, 4, 16)), model.oracle(PROMPT, 30), backend="cudagraph")
    decoder.assembly.complete()
    found = decoder.generate(PROMPT, max_new_tokens=16)

    assert found.tokens == model.reference(PROMPT, 16)
    assert found.metrics.iterations < 10
    expected = model.decoder(PLAIN_POLICY).generate(PROMPT, max_new_tokens=8, sampling=drawn)
    assert decoder.generate(PROMPT, max_new_tokens=8, sampling=drawn).tokens == expected.tokens
