"""Times of a text's beginning and of what follows it, both ways over the same tokens."""

import importlib
from types import ModuleType

import pytest
from tiny_pair import TEXT

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("measure_temperatures")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_ways_write_the_same_and_are_parted_at_the_border(script, pair, temperature):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    for number in (0, 1):
        plain, ours = script._both(decoder, TEXT[:9], SamplingParams(temperature=temperature), number, 8, 20)

        assert plain.tokens == ours.tokens
        assert len(plain.tokens) == 20
        assert (plain.beginning[1], plain.rest[1]) == (7, 12), "the first token is the prompt's"
        assert ours.beginning[1] + ours.rest[1] == 19
        assert 7 <= ours.beginning[1] <= 9, "an iteration may go past the border"
        assert min(plain.beginning[0], plain.rest[0], ours.beginning[0], ours.rest[0]) > 0.0


def test_ratios_are_of_times_a_token_of_all_prompts_together(script):
    """Plain 2 ms a token; ours 12 ms for 10 and 8 for 6, which is 1.25."""
    assert script._over_plain([((20.0, 10), (12.0, 10)), ((12.0, 6), (8.0, 6))]) == pytest.approx(1.25 / 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperatures": "0,warm"}, "--temperatures 0,warm is not a list of numbers"),
        ({"temperatures": "0,-1"}, "temperature"),
        ({"from_token": 400}, "no token of 400 lies behind --from-token 400"),
    ],
)
def test_what_nobody_can_mean_is_refused_before_a_model_is_loaded(script, options, sentence):
    with pytest.raises(YggdrasilError, match=sentence):
        script.main([], plan="nowhere", **options)


def test_texts_that_would_not_fit_are_refused(script, pair, monkeypatch, tmp_path):
    """They would end before the rest begins."""
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    monkeypatch.setattr(decoder, "plan", object())
    monkeypatch.setattr(script.Decoder, "from_plan", lambda _: decoder)

    with pytest.raises(YggdrasilError, match="end 49 tokens before --max-new-tokens 150; give --max-prompt-tokens 49"):
        script.main([], plan="tiny", max_new_tokens=150, from_token=20)


def test_prompts_are_of_all_parts_of_a_file(script, pair, monkeypatch, tmp_path):
    file, decoded = tmp_path / "prompts.jsonl", []
    file.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcd"))

    def both(decoder, tokens, *_):
        decoded.append(decoder.tokenizer.decode(tokens))
        return script.Run([], (1.0, 1), (1.0, 1)), script.Run([], (1.0, 1), (1.0, 1))

    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    monkeypatch.setattr(decoder, "plan", object())
    monkeypatch.setattr(script.Decoder, "from_plan", lambda _: decoder)
    monkeypatch.setattr(script, "_both", both)
    script.main([file], plan="tiny", temperatures="0", limit=2, max_new_tokens=30, from_token=20, max_prompt_tokens=9)

    assert decoded == ["a", "a", "c"], "the first is a warm-up"
