"""``custom_generate`` inside transformers' own ``generate``: the same tokens, ends, processors and stream."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_pair import SHAPES, TEXT, byte_tokenizer
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import yggdrasil
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

PROMPT = torch.tensor([TEXT[:12]])
GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


@pytest.fixture(scope="module")
def ours(pair):
    return yggdrasil.custom_generate(pair.decoder(FixedPolicy(TreeShape(2, 3, 8))))


def both(pair, ours, **options):
    given = {**GREEDY, **options}
    return tuple(
        pair.plain_target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **given, **more)
        for more in ({}, {"custom_generate": ours})
    )


def test_the_folder_form_takes_a_streamer(pair, monkeypatch, tmp_path):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 3, 8)))
    monkeypatch.setattr("yggdrasil.in_transformers.Decoder.from_plan", lambda plan: decoder)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    folder = str(Path(yggdrasil.__file__).parents[1] / "scripts" / "transformers")
    seen = []
    streamer = SimpleNamespace(put=lambda value: seen.extend(value.flatten().tolist()), end=lambda: seen.append("end"))
    options = {**GREEDY, "custom_generate": folder, "trust_remote_code": True, "plan": "mine", "streamer": streamer}
    found = pair.plain_target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)

    assert [*found[0].tolist(), "end"] == seen
    assert (
        found.tolist() == pair.plain_target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY).tolist()
    )


class NotTwice(LogitsProcessor):
    """Forbids the last token: a function of the prefix."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class EndsAt(StoppingCriteria):
    """Ends the text at a token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == self.token


def test_greedy_text_is_transformers_own(pair, ours):
    expected, found = both(pair, ours)

    assert found.tolist() == expected.tolist()
    assert found.dtype == expected.dtype


def test_processors_and_configuration_hold(pair, ours):
    expected, found = both(pair, ours, logits_processor=LogitsProcessorList([NotTwice()]), repetition_penalty=1.3)

    assert found.tolist() == expected.tolist()
    assert found.tolist() != both(pair, ours)[0].tolist()


def test_text_ends_where_criteria_and_end_tokens_say(pair, ours):
    text = both(pair, ours)[0][0, PROMPT.shape[1] :].tolist()
    last = text[9]
    for ending in ({"stopping_criteria": StoppingCriteriaList([EndsAt(last)])}, {"eos_token_id": last}):
        expected, found = both(pair, ours, **ending)
        assert found.tolist() == expected.tolist()
        assert found.shape[1] <= PROMPT.shape[1] + 10


def test_sampling_follows_the_seed_of_pytorch(pair, ours):
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(both(pair, ours, do_sample=True, temperature=100.0, top_k=20)[1].tolist())

    assert texts[0] == texts[1] != texts[2]


def test_a_dictionary_and_a_stream_come_where_asked_for(pair, ours):
    class Seen:
        def __init__(self):
            self.tokens, self.has_ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.has_ended = True

    seen = Seen()
    options = {**GREEDY, "return_dict_in_generate": True, "custom_generate": ours, "yggdrasil_streamer": seen}
    found = pair.plain_target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)

    assert found.sequences[0].tolist() == seen.tokens
    assert seen.has_ended


def test_more_tokens_than_there_is_room_for_take_no_room(pair, ours):
    options = {**GREEDY, "max_new_tokens": 10**13, "max_time": 0.2}
    found = pair.plain_target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), custom_generate=ours, **options)

    assert found.shape[1] > PROMPT.shape[1]


def test_a_text_that_the_plans_context_cuts_off_is_told(pair, ours):
    options = {**GREEDY, "max_new_tokens": 400, "custom_generate": ours}
    with pytest.warns(UserWarning, match=f"context of {SHAPES.max_length} tokens"):
        found = pair.plain_target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)

    assert found.shape[1] == SHAPES.max_length


def test_what_is_not_decoded_is_refused(pair, ours):
    two = PROMPT.repeat(2, 1)
    with pytest.raises(YggdrasilError, match="one at a time"):
        pair.plain_target.generate(two, attention_mask=torch.ones_like(two), custom_generate=ours, **GREEDY)


def test_embeddings_are_refused(pair, ours):
    """transformers goes on from them and not from the tokens."""
    states = torch.zeros(1, PROMPT.shape[1], pair.plain_target.config.hidden_size)
    with pytest.raises(YggdrasilError, match="inputs_embeds are given"):
        pair.plain_target.generate(PROMPT, inputs_embeds=states, custom_generate=ours, **GREEDY)


def test_stop_strings_are_a_criterion(pair, ours):
    text = byte_tokenizer().decode(both(pair, ours)[0][0, PROMPT.shape[1] :])
    criteria = StoppingCriteriaList([StopStringCriteria(byte_tokenizer(), [text[6:9]])])
    expected, found = both(pair, ours, stopping_criteria=criteria)

    assert found.tolist() == expected.tolist()
    assert found.shape[1] < PROMPT.shape[1] + GREEDY["max_new_tokens"]
