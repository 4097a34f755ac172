"""A token's own text, as log-probabilities tell it."""

from types import SimpleNamespace

import pytest
from fallback_tokenizer import fallback_tokenizer, tokens_of
from tiny_pair import byte_tokenizer
from transformers import CodeLlamaTokenizer

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.serving.logprobs import CompletionLogprobsWriter, chat_logprobs
from yggdrasil.serving.tokenization import Texts

NAMES = ("the", "▁the", "▁tree", "▁", "s", "\n", "é", "😀", "▁the")


def texts_of(tokenizer):
    return Texts(SimpleNamespace(tokenizer=tokenizer, assembly=SimpleNamespace(engine=SimpleNamespace(max_length=64))))


def test_bytes_of_tokens_add_up_to_their_text():
    texts, tokens = texts_of(fallback_tokenizer()), tokens_of(*NAMES)

    assert b"".join(map(texts.token_bytes, tokens)).decode() == fallback_tokenizer().decode(tokens)
    assert [texts.token_text(token) for token in tokens_of("▁the", "the", "▁", "<s>")] == [" the", "the", " ", "<s>"]
    assert texts.token_text(tokens_of("😀")[0]) == "bytes:\\xf0"


def test_a_text_that_goes_on_begins_without_a_space():
    """What follows a gap is filled in before it: `<PRE> {before} <SUF>{after} <MID>`, as CodeLlama has learned it."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁retun", "re", "▁re"]
    spaced = CodeLlamaTokenizer({name: i for i, name in enumerate(names)}, [("r", "e"), ("▁", "re")])
    for text, tokens in {"return re": "re t u r n ▁re", " re": "▁re", "\nre": "<0x0A> re", "": ""}.items():
        assert spaced.convert_ids_to_tokens(texts_of(spaced).encode_continuation(text)) == tokens.split()
    plain = texts_of(byte_tokenizer())
    assert plain.encode_continuation("\n a") == plain.encode("\n a", special=False)


@pytest.mark.parametrize("token", range(len(byte_tokenizer())))
def test_a_byte_level_token_is_the_bytes_of_its_letters(token):
    texts = texts_of(byte_tokenizer())

    assert texts.token_bytes(token).decode(errors="replace") == byte_tokenizer().decode([token])


def test_a_word_with_and_without_its_space_are_two_of_the_likeliest():
    texts, (with_space, without) = texts_of(fallback_tokenizer()), tokens_of("▁the", "the")
    entry = TokenLogprobs(with_space, -0.1, [(with_space, -0.1), (without, -2.0)])
    written = CompletionLogprobsWriter(texts).write([entry])
    (chat,) = chat_logprobs(texts, [entry]).content

    assert written.top_logprobs == [{" the": -0.1, "the": -2.0}]
    assert bytes(chat.bytes) == b" the"
    assert [each.token for each in chat.top_logprobs] == [" the", "the"]


def test_offsets_count_the_letters_of_the_text():
    """A letter of four tokens is one letter: what follows it begins where it does in the text."""
    names = ("the", "😀", "s")
    texts, tokens = texts_of(fallback_tokenizer()), tokens_of(*names)
    written = CompletionLogprobsWriter(texts).write([TokenLogprobs(token, -1.0, []) for token in tokens])

    assert len(tokens) == 6
    assert written.text_offset == [0, 3, 3, 3, 3, 4]
