"""What callers give to a request: right, or one sentence; never something else in silence."""

import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from tiny_pair import TEXT

from yggdrasil import Constraint, SamplingParams, Speculation
from yggdrasil.engine.request_options import RequestOptions, RequestSettings
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

TREE = FixedPolicy(TreeShape(2, 3, 8))
NAN, INF = float("nan"), float("inf")
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("prompt", "kind", "sentence"),
    [
        (b"abc", TypeError, "the prompt is a bytes; it must be a list of whole numbers"),
        ([1.5], TypeError, "the prompt holds 1.5, which is no whole number"),
        ([1, True], TypeError, "the prompt holds True, which is no whole number"),
        (["a"], TypeError, "the prompt holds 'a', which is no whole number"),
        (5, TypeError, "the prompt is 5; it must be text or a list"),
        (None, TypeError, "the prompt is None; it must be text or a list"),
        ({"input_ids": [1]}, TypeError, "the prompt is a dict"),
        (MESSAGES, TypeError, "the prompt is a list of messages; give those to chat or stream_chat"),
        ("a\ud800", ValueError, r"the prompt has half of a surrogate pair \('\\ud800'\) as character 2"),
        ([10**30], YggdrasilError, "the vocabulary ends at 95"),
    ],
)
def test_prompts_that_are_none(pair, prompt, kind, sentence):
    decoder = pair.decoder(TREE)
    for ask in (decoder.generate, decoder.start, lambda given: list(decoder.stream(given))):
        with pytest.raises(kind, match=sentence) as caught:
            ask(prompt)
        assert isinstance(caught.value, YggdrasilError)


@pytest.mark.parametrize("prompt", [list(TEXT[:9]), np.array(TEXT[:9]), torch.tensor(TEXT[:9]), iter(TEXT[:9])])
def test_any_sequence_of_whole_numbers_is_a_prompt(pair, prompt):
    assert pair.decoder(TREE).generate(prompt, max_new_tokens=5).tokens == pair.reference(TEXT[:9], 5)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens is 1.5; it must be a whole number, at least 1"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens is True"),
        ({"max_new_tokens": "9"}, TypeError, "max_new_tokens is '9'"),
        ({"max_new_tokens": None}, TypeError, "max_new_tokens is None"),
        ({"max_new_tokens": INF}, TypeError, "max_new_tokens is inf"),
        ({"max_new_tokens": 0}, YggdrasilError, "max_new_tokens is 0; it must be at least 1"),
        ({"stop": b"a"}, TypeError, "stop is b'a'; it must be a text or a list of texts"),
        ({"stop": [1]}, TypeError, "stop holds 1, which is no text"),
        ({"stop": {"a": 1}}, TypeError, "stop is {'a': 1}"),
        ({"stop": 5}, TypeError, "stop is 5"),
        ({"stop": ""}, ValueError, "stop holds an empty text"),
        ({"stop": ["a", "\udfff"]}, ValueError, "stop has half of a surrogate pair"),
        ({"include_stop": 1}, TypeError, "include_stop is 1; it must be True or False"),
        ({"ignore_eos": "no"}, TypeError, "ignore_eos is 'no'"),
        ({"wait": None}, TypeError, "wait is None"),
        ({"begins_turn": 0}, TypeError, "begins_turn is 0"),
        ({"keeps_special": ""}, TypeError, "keeps_special is ''"),
        ({"speculation": "match"}, TypeError, "speculation is 'match'; it must be a Speculation object"),
        ({"speculation": None}, TypeError, "speculation is None"),
        ({"sampling": {"top_k": 5}}, TypeError, "sampling is {'top_k': 5}; it must be a SamplingParams object"),
        ({"temperature": 1.0}, TypeError, r"no option temperature; give sampling=SamplingParams\(temperature="),
        ({"max_tokens": 1}, TypeError, "there is no option max_tokens; there are max_new_tokens, stop"),
    ],
)
def test_options_that_are_none(pair, options, kind, sentence):
    decoder = pair.decoder(TREE)
    for ask in (decoder.generate, decoder.start, lambda given, **more: list(decoder.stream(given, **more))):
        with pytest.raises(kind, match=sentence) as caught:
            ask(TEXT[:5], **options)
        assert isinstance(caught.value, YggdrasilError)
    with pytest.raises((kind, YggdrasilError)):
        decoder.chat(MESSAGES, **options)


def test_options_and_settings_have_the_same_names():
    assert list(RequestOptions.__annotations__) == [field.name for field in fields(RequestSettings)]


def test_a_text_where_a_list_is_meant_is_one_item(perfect_pair):
    decoder = perfect_pair.decoder(TREE)
    text = decoder.generate(TEXT[:20], max_new_tokens=30).text
    word = text[4:7]
    one, listed, none = (decoder.generate(TEXT[:20], max_new_tokens=30, stop=stop) for stop in (word, [word], None))

    assert one.text == listed.text == text[: text.index(word)]
    assert none.text == text
    assert SamplingParams(bad_words="abc").bad_words == SamplingParams(bad_words=["abc"]).bad_words == ("abc",)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"top_k": 2.5}, TypeError),
        ({"top_k": True}, TypeError),
        ({"top_k": -1}, ValueError),
        ({"logprobs": True}, TypeError),
        ({"logprobs": 1.0}, TypeError),
        ({"seed": 1.0}, TypeError),
        ({"seed": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"min_new_tokens": "1"}, TypeError),
        ({"temperature": "1"}, TypeError),
        ({"temperature": True}, TypeError),
        ({"temperature": None}, TypeError),
        *(({"temperature": value}, ValueError) for value in (NAN, INF, -1, 1e-40, 9e-5, 1e300, 10**400)),
        *(({"top_p": value}, ValueError) for value in (NAN, 0, 1.1)),
        *(({"typical_p": value}, ValueError) for value in (NAN, 0, 1.1)),
        *(({"min_p": value}, ValueError) for value in (NAN, -0.1, 1.1)),
        *(({"repetition_penalty": value}, ValueError) for value in (NAN, INF, 0, -1, 1e30)),
        *(({"presence_penalty": value}, ValueError) for value in (NAN, INF, 1e30)),
        *(({"frequency_penalty": value}, ValueError) for value in (NAN, -INF, 1e30)),
        *(({"logit_bias": {5: value}}, ValueError) for value in (NAN, INF, 1e30)),
        ({"logit_bias": {5: "1"}}, TypeError),
        ({"logit_bias": {"5": 1.0}}, TypeError),
        ({"logit_bias": {-1: 1.0}}, ValueError),
        ({"logit_bias": [5]}, TypeError),
        ({"bad_words": b"ab"}, TypeError),
        ({"bad_words": 5}, TypeError),
        ({"bad_words": [5]}, TypeError),
        ({"bad_words": [[1.5]]}, TypeError),
        ({"bad_words": ["a", ""]}, ValueError),
        ({"bad_words": [[]]}, ValueError),
        ({"bad_words": ["\ud800"]}, ValueError),
        ({"logits_processors": 5}, TypeError),
        ({"logits_processors": [5]}, TypeError),
        ({"constraint": {"type": "object"}}, TypeError),
    ],
)
def test_sampling_that_is_none(values, kind):
    with pytest.raises(kind, match=rf"{next(iter(values))}.* (must|holds|has) ") as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, YggdrasilError)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"rule": "fast"}, ValueError),
        ({"exactness": None}, ValueError),
        ({"expansion": 2}, TypeError),
        ({"expansion": "2,1"}, TypeError),
        ({"expansion": (2, 1.5)}, TypeError),
        ({"expansion": ()}, ValueError),
        ({"expansion": (2, 0)}, ValueError),
        ({"tolerance": NAN}, ValueError),
        ({"tolerance": -1}, ValueError),
        ({"fixed_width": 8.0}, TypeError),
        ({"fixed_width": 1}, ValueError),
        ({"typical_epsilon": 0}, ValueError),
        ({"relaxed_topk": 0}, ValueError),
        ({"audit": 1}, TypeError),
        ({"thinking_only": "yes"}, TypeError),
    ],
)
def test_speculation_that_is_none(values, kind):
    with pytest.raises(kind, match=next(iter(values))) as caught:
        Speculation(**values)
    assert isinstance(caught.value, YggdrasilError)


def test_numbers_of_others_become_pythons_own(pair):
    """What reads them tests for those alone."""
    sampling = SamplingParams(
        temperature=np.float32(1), top_k=np.int64(5), top_p=np.float64(0.5), min_new_tokens=torch.tensor(2)
    )
    assert [type(each) for each in (sampling.temperature, sampling.top_k, sampling.top_p)] == [float, int, float]
    assert sampling == SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_new_tokens=2)
    assert type(Speculation(relaxed_topk=np.int64(4)).relaxed_topk) is int

    found, wanted = (
        pair.decoder(TREE).generate(TEXT[:9], max_new_tokens=6, sampling=SamplingParams(1.0, top_k=k, seed=2))
        for k in (np.int64(5), 5)
    )
    assert found.tokens == wanted.tokens


@pytest.mark.parametrize(
    "give", [lambda ids, scores: None, lambda ids, scores: scores.numpy(), lambda ids, scores: scores[:, :5]]
)
def test_a_processor_that_gives_no_scores_back_is_named(pair, give):
    give.__name__ = "mine"
    with pytest.raises(YggdrasilError, match=r"the logits processor mine returned .*, not scores of shape \(1, 96\)"):
        pair.decoder(TREE).generate(TEXT[:9], max_new_tokens=6, sampling=SamplingParams(logits_processors=[give]))


def test_a_text_cannot_be_scored_by_plain_steps_alone(pair):
    shapes = Shapes(max_length=100, draft_widths=(), verify_widths=(1,), prefill_widths=(16,))
    decoder = pair.decoder(PLAIN_POLICY, shapes, drafter=None)
    with pytest.raises(YggdrasilError, match="this plan has plain steps alone; calibrate one without --drafter none"):
        list(decoder.score(TEXT[:9]))


def test_a_schema_may_be_what_its_json_stands_for():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    assert json.loads(Constraint("json_schema", schema).text) == schema
    for given in ({"type": object}, [1], None, 5):
        with pytest.raises(TypeError):
            Constraint("json_schema", given)
    with pytest.raises(TypeError, match=r"the regex is \{\}; it must be a text"):
        Constraint("regex", {})
    with pytest.raises(ValueError, match="a constraint's kind is 'json'; it must be one of json_schema, regex"):
        Constraint("json", "{}")
    with pytest.raises(ValueError, match="the regex has half of a surrogate pair"):
        Constraint("regex", "\ud800")


def test_what_is_no_name_is_refused_whatever_it_is():
    for value in (np.array(["off", "match"]), None, ["off"], 3):
        for given in ({"rule": value}, {"exactness": value}):
            with pytest.raises(ValueError, match="it must be one of"):
                Speculation(**given)
        with pytest.raises(ValueError, match=r"a constraint's kind is .* it must be one of"):
            Constraint(value, "x")
    with pytest.raises(TypeError, match=r"a constraint's title is .* it must be a text"):
        Constraint("regex", "x", np.array("title"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculation", [False, True, Speculation(expansion=(2, 1))])
@pytest.mark.parametrize("value", [NAN, INF])
def test_scores_that_are_not_finite_end_the_request(pair, value, speculation, temperature):
    def broken(tokens, scores):
        scores = scores.clone()
        if tokens.shape[1] > 12:
            scores[0, 3] = value
        return scores

    decoder = pair.decoder(TREE)
    sampling = SamplingParams(logits_processors=[broken], temperature=temperature)
    with pytest.raises(YggdrasilError, match="the scores to choose from are not finite"):
        decoder.generate(TEXT[:9], max_new_tokens=20, speculation=speculation, sampling=sampling)

    assert decoder.generate(TEXT[:9], max_new_tokens=20).tokens == pair.reference(TEXT[:9], 20)
