"""Text is streamed as it becomes final, and with the prompt before it, it is one text."""

import pytest
from examples import examples
from fallback_tokenizer import WORDS, fallback_tokenizer, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_pair import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from yggdrasil.engine.text_stream import TextStream
from yggdrasil.policy.fixed import PLAIN_POLICY

BYTES = ("😀", "é", "<0xF0>", "<0x9F>", "<0xFF>", "<0x41>")


def streamed(tokens, before=(), stop=(), block=1):
    """The text of all pieces; it is the stream's, too."""
    stream = TextStream(fallback_tokenizer(), frozenset(), len(tokens), stop, before=before)
    pieces = ""
    for start in range(0, len(tokens), block):
        stream.push(tokens[start : start + block])
        pieces += stream.release()
    assert stream.text == pieces
    return pieces


def decoded(tokens):
    return fallback_tokenizer().backend_tokenizer.decode(list(tokens), skip_special_tokens=True)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("stop", [(), ("never this",)])
@pytest.mark.parametrize(
    "prompt",
    [["the", "▁tree"], ["the", "\n"], ["the", "▁"], ["the", "😀"], ["<s>", "▁the", "</s>"], ["<s>", "▁", "▁the"]],
)
def test_prompt_and_text_are_one_text(prompt, stop, block):
    before, tokens = tokens_of(*prompt), tokens_of("▁tree", "s", "é", "▁the", "😀", "\n")

    assert decoded(before) + streamed(tokens, before, stop, block) == decoded([*before, *tokens])


def test_a_text_with_nothing_before_begins_without_a_space():
    tokens = tokens_of("▁the", "▁tree")

    assert streamed(tokens) == streamed(tokens, tokens_of("<s>")) == "the tree"


def test_a_prompt_that_ends_within_a_character_is_not_told_again():
    assert streamed(tokens_of("▁the"), tokens_of("the", "<0xF0>")) == "the"


@pytest.mark.parametrize("stop", [(), ("never this",)])
@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["😀", "<0xF0>", "▁the", "▁tree"], "😀� the tree"),
        (["😀", "<0xF0>", "<0x9F>", "▁the", "😀", "!"], "😀�� the😀!"),
        (["the", "😀", "<0xF0>"], "the😀�"),
        (["😀", "<0xFF>", "s", "<0xFF>", "▁the"], "😀�s� the"),
        (["the", "<0xF0>", "▁tree"], "the� tree"),
    ],
)
def test_bytes_that_are_no_character_are_replaced_and_the_text_goes_on(names, text, stop):
    assert streamed(tokens_of(*names), stop=stop) == text


@examples(300)
@given(st.lists(st.sampled_from([*WORDS, *BYTES, "<0xE2>", "<0x82>", "<0xAC>"]), min_size=1), st.integers(2, 12))
def test_accepted_drafts_do_not_change_what_is_streamed(names, block):
    """Also where a run of bytes begins with a character and ends as none, which replaces the character."""
    tokens = tokens_of(*names)
    assert streamed(tokens, block=block) == streamed(tokens)


def test_a_stop_string_behind_such_bytes_is_found():
    stream = TextStream(fallback_tokenizer(), frozenset(), 100, ["tree"])
    for token in tokens_of("😀", "<0xF0>", "▁the", "▁tree", "s"):
        stream.push([token])

    assert (stream.text, stream.finish_reason) == ("😀� the ", "stop")


@pytest.mark.parametrize(("stop", "text"), [("e", "tr"), ("ree", "t"), ("</s> t", "")])
def test_a_stop_string_is_cut_off_where_a_special_token_has_taken_the_first_space(stop, text):
    stream = TextStream(fallback_tokenizer(), frozenset(), 100, [stop])
    stream.push(tokens_of("</s>", "▁tree", "s"))

    assert (stream.text, stream.release(), stream.finish_reason) == (text, text, "stop")


@examples(200)
@given(st.lists(st.sampled_from(WORDS + BYTES), min_size=1), st.lists(st.sampled_from(WORDS + BYTES)), st.data())
def test_no_tokens_end_a_text_before_its_end(names, prompt, data):
    """Whatever they are; where all are whole characters the text is what they decode to."""
    tokens, before = tokens_of(*names), tokens_of(*prompt)
    text = streamed(tokens, before, block=data.draw(st.integers(1, 5)))

    assert text.endswith(decoded(tokens)[-1:])
    if "�" not in decoded(before) + decoded([*before, *tokens]):
        assert decoded(before) + text == decoded([*before, *tokens])


@examples(100)
@given(st.lists(st.integers(0, 95), max_size=9), st.lists(st.integers(0, 95), min_size=1, max_size=20))
def test_a_byte_level_text_is_the_same_whatever_comes_before(before, tokens):
    stream = TextStream(byte_tokenizer(), frozenset(), len(tokens), [], before=before)
    for token in tokens:
        stream.push([token])

    assert stream.text == byte_tokenizer().decode(tokens, skip_special_tokens=True)


def test_a_prompt_is_gone_on_from_and_a_chat_answered(pair):
    """An answer begins a turn: a space there is what the template has between the two."""
    decoder = pair.decoder(PLAIN_POLICY)
    words = Tokenizer(models.WordLevel({f"▁w{number}": number for number in range(96)}, unk_token="▁w0"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), fallback_tokenizer().backend_tokenizer.decoder
    decoder.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    prompt, options = "w5 w7 w9", {"max_new_tokens": 4}
    chat = [{"role": "user", "content": prompt}]
    answer = "".join(decoder.stream_chat(chat, **options))

    assert answer.startswith("w")
    assert decoder.chat(chat, **options).text == answer
    assert decoder.generate(prompt, **options).text == "".join(decoder.stream(prompt, **options)) == " " + answer
    assert decoder.generate(words.encode(prompt).ids, **options).text == " " + answer
