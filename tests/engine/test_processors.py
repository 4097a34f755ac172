"""transformers' own logits processors, in our loops and in theirs: the same tokens, drawn or not."""

from itertools import count

import numpy as np
import pytest
import torch
from tiny_pair import TEXT
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from yggdrasil.acceptance.coins import SeededCoins
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, OFF, Speculation
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

PROMPT = list(TEXT[:20])
EGT = FixedPolicy(TreeShape(2, 3, 8))
COUNT, SEED = 24, 5
WARM = 40.0  # the tiny models are sure of themselves: at this temperature they hesitate
WAYS = (OFF, DEFAULT, Speculation(expansion=(3, 1, 1)))


def prompts_own(make):
    """A processor that is made of the prompt."""
    return lambda: make(torch.tensor([PROMPT]))


PROCESSORS = {
    "no repeated pair": lambda: theirs.NoRepeatNGramLogitsProcessor(2),
    "nothing of the prompt": prompts_own(lambda prompt: theirs.EncoderNoRepeatNGramLogitsProcessor(1, prompt)),
    "like the prompt": prompts_own(lambda prompt: theirs.EncoderRepetitionPenaltyLogitsProcessor(8.0, prompt)),
    "repetition": lambda: theirs.RepetitionPenaltyLogitsProcessor(1.4),
    "bias on a sequence": lambda: theirs.SequenceBiasLogitsProcessor([[[7], 80.0], [[7, 30], -90.0]]),
    "no bad words": lambda: theirs.NoBadWordsLogitsProcessor([[12, 7], [57]]),
    "suppressed": lambda: theirs.SuppressTokensLogitsProcessor([7, 12, 57], device="cpu"),
    "suppressed first": lambda: theirs.SuppressTokensAtBeginLogitsProcessor(
        list(range(1, 60)), len(PROMPT), device="cpu"
    ),
    "forced end": lambda: theirs.ForcedEOSTokenLogitsProcessor(len(PROMPT) + COUNT, 3, device="cpu"),
    "prefix": lambda: theirs.PrefixConstrainedLogitsProcessor(
        lambda _, ids: [i for i in range(96) if i % 3 == len(ids) % 3], num_beams=1
    ),
}  # fmt: skip
WARPERS = {
    "temperature": {},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.7},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.2},
    "epsilon": {"own": lambda: theirs.EpsilonLogitsWarper(0.02)},
    "eta": {"own": lambda: theirs.EtaLogitsWarper(0.05, device="cpu")},
    "top_h": {"own": lambda: theirs.TopHLogitsWarper(0.5)},
}


def generate(pair, **options):
    inputs = torch.tensor([PROMPT])
    settings = {"max_new_tokens": COUNT, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **options}
    output = pair.plain_target.generate(inputs, attention_mask=torch.ones_like(inputs), **settings)
    return output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", PROCESSORS)
def test_best_tokens_under_a_processor(pair, name):
    make = PROCESSORS[name]
    expected = generate(pair, logits_processor=LogitsProcessorList([make()]))
    decoder = pair.decoder(EGT)

    assert expected != pair.reference(PROMPT, COUNT), "the processor does nothing here"
    for way in WAYS:
        sampling = SamplingParams(logits_processors=(make(),))
        assert decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=way).tokens == expected


def test_what_fails_behind_the_end_of_a_text_does_not_fail_the_text(pair):
    """A tree continues after ``max_new_tokens``, where a processor may fail; plain decoding never calls it there."""

    def table(ids, scores):
        assert ids.shape[1] < len(PROMPT) + 9, "called after the end of the text"
        return scores

    decoder, sampling = pair.decoder(FixedPolicy(TreeShape(2, 8, 16))), SamplingParams(logits_processors=(table,))
    for way in WAYS:
        found = decoder.generate(PROMPT, max_new_tokens=9, sampling=sampling, speculation=way).tokens
        assert found == pair.reference(PROMPT, 9)
        with pytest.raises(AssertionError, match="after the end of the text"):
            decoder.generate(PROMPT, max_new_tokens=10, sampling=sampling, speculation=way)
    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == pair.reference(PROMPT, COUNT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_in_another_dtype_are_taken(pair, dtype, temperature):
    """The same tokens are chosen from a processor's scores in any dtype, plainly and with drafts."""
    process = lambda _, scores: (scores / 2).to(dtype)  # noqa: E731
    sampling = SamplingParams(logits_processors=(process,), temperature=temperature, seed=3)
    decoder = pair.decoder(EGT)
    found = [decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=way).tokens for way in WAYS]
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("name", WARPERS)
def test_drawn_tokens_with_the_same_coins(pair, monkeypatch, name):
    """Their loop draws with our coins: then the tokens are ours."""
    options = dict(WARPERS[name])
    own = options.pop("own", None)
    places = count(len(PROMPT))

    def draw(probabilities, num_samples):
        with np.errstate(divide="ignore"):
            scores = np.log(probabilities[0].double().numpy())
        return torch.tensor([[SeededCoins(SEED).at(next(places), "target").draw(scores).token]])

    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", draw)
        extra = LogitsProcessorList([theirs.TemperatureLogitsWarper(WARM), own()] if own else [])
        temperature = {} if own else {"temperature": WARM}
        settings = {"top_k": 0, **temperature, **options}
        expected = generate(pair, do_sample=True, logits_processor=extra, **settings)
    decoder = pair.decoder(EGT)
    warm = SamplingParams(temperature=WARM, seed=SEED)
    unbent = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=warm, speculation=OFF).tokens

    assert (expected == unbent) == (name == "temperature"), "the warper does nothing here"
    for way in WAYS:
        # A processor of the caller's own comes before the temperature; here it is meant to come after it.
        mine = (theirs.TemperatureLogitsWarper(WARM), own()) if own else ()
        sampling = SamplingParams(
            temperature=1.0 if own else WARM, seed=SEED, logits_processors=mine, **options
        )  # fmt: skip
        assert decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=way).tokens == expected
