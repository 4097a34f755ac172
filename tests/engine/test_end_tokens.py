"""A request ends at the token at which plain decoding would end, wherever in an accepted block that is."""

import copy
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_pair import SHAPES, TEXT, VOCAB_SIZE, byte_tokenizer, chat_tokenizer
from tokenizers import AddedToken
from transformers import GenerationConfig

from yggdrasil.engine.end_tokens import end_tokens, template_end_tokens
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:20]
BLOCK = FixedPolicy(TreeShape(1, 4, 8))  # five tokens an iteration with a drafter that is always right
POLICIES = {"plain": PLAIN_POLICY, "chain": BLOCK, "tree": FixedPolicy(TreeShape(4, 4, 16))}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def plain_end(tokens, eos=(), limit=1000, stop=(), include_stop=False):
    """The slow twin: decode the whole text again after every token. Returns (tokens, text, reason)."""
    for count in range(1, len(tokens) + 1):
        taken = tokens[:count]
        if taken[-1] in eos:
            return taken, text_of(taken[:-1]), "eos"
        text = text_of(taken)
        whole = text.rstrip("�")  # bytes that have not become a character yet cannot complete a stop string
        ends = [(whole.find(word), word) for word in stop if word in whole]
        if ends:
            place, word = min(ends)
            return taken, text[: place + len(word) * include_stop], "stop"
        if count == limit:
            return taken, text, "length"
    raise AssertionError("the text does not end")


def text_of(tokens):
    """Text of tokens; bytes that are no character at the end are replacement characters there."""
    return byte_tokenizer().decode(tokens, skip_special_tokens=True)


def run(decoder, prompt=PROMPT, **options):
    """Stream a request and check that its pieces are its text; returns (tokens, text, reason)."""
    request = decoder.start(prompt, **options)
    pieces = list(request)
    result = request.result()
    assert "".join(pieces) == result.text
    return result.tokens, result.text, result.finish_reason


def test_the_reference_text_is_fit_for_these_tests(perfect_pair):
    """Every end below falls on each place of a block, and some characters span tokens."""
    tokens = perfect_pair.reference(PROMPT, 41)
    firsts = {tokens.index(token) for token in tokens}

    assert {(place - 1) % 5 for place in firsts if place} == {0, 1, 2, 3, 4}
    assert perfect_pair.decoder(BLOCK).generate(PROMPT, max_new_tokens=41).metrics.aal == 5.0


@policies
def test_end_token_at_every_place(perfect_pair, policy):
    tokens = perfect_pair.reference(PROMPT, 41)
    for token in set(tokens):
        decoder = perfect_pair.decoder(policy, eos=[token])

        assert run(decoder, max_new_tokens=41) == plain_end(tokens, eos=[token])
    assert run(decoder, max_new_tokens=41, ignore_eos=True) == plain_end(tokens, limit=41)


@policies
def test_length_at_every_place(perfect_pair, policy):
    decoder, tokens = perfect_pair.decoder(policy), perfect_pair.reference(PROMPT, 41)
    for limit in range(1, 13):
        assert run(decoder, max_new_tokens=limit) == plain_end(tokens, limit=limit)


@policies
def test_stop_strings_at_every_place(perfect_pair, policy):
    decoder, tokens = perfect_pair.decoder(policy), perfect_pair.reference(PROMPT, 41)
    text = text_of(tokens)
    for place in range(16):
        end, include_stop = place + 6, place % 2 == 1  # blocks have five tokens, so each place of one has both
        for words in (
            (text[place : place + 1],),
            (text[place:end], "never this", text[place + 3 : end]),  # both end at once: the one that began first counts
            (text[place + 2 : end], text[place : end + 2]),  # the second begins first and ends too late
        ):
            ended = run(decoder, max_new_tokens=41, stop=words, include_stop=include_stop)

            assert ended == plain_end(tokens, stop=words, include_stop=include_stop)


@policies
def test_an_end_beats_the_length_at_the_same_token(perfect_pair, policy):
    tokens = perfect_pair.reference(PROMPT, 41)
    eos, place = tokens[7], tokens.index(tokens[7])
    assert run(perfect_pair.decoder(policy, eos=[eos]), max_new_tokens=place + 1)[2] == "eos"

    stopped = plain_end(tokens, stop=[text_of(tokens)[4:7]])
    ended = run(perfect_pair.decoder(policy), max_new_tokens=len(stopped[0]), stop=[text_of(tokens)[4:7]])
    assert ended == stopped


@policies
def test_text_that_may_become_a_stop_string_is_held_back(perfect_pair, policy):
    decoder, tokens = perfect_pair.decoder(policy), perfect_pair.reference(PROMPT, 41)
    text = text_of(tokens)
    stop = text[6:14] + "#"  # never completed

    shown = ""
    for piece in decoder.start(PROMPT, max_new_tokens=41, stop=[stop]):
        shown += piece
        assert text.startswith(shown)
    assert shown == text
    assert run(decoder, max_new_tokens=41, stop=[stop]) == plain_end(tokens, limit=41)


@policies
@pytest.mark.parametrize("num_free", range(1, 14))
def test_a_full_context_ends_the_text_at_its_last_place(perfect_pair, policy, num_free):
    """Prompt and text fill the context exactly; no row is kept, and no position used, past its last place."""
    shapes = replace(SHAPES, max_length=len(PROMPT) + num_free)
    decoder = perfect_pair.decoder(policy, shapes)
    tokens, text, reason = run(decoder, max_new_tokens=100)

    assert reason == "context"
    assert tokens == perfect_pair.reference(PROMPT, num_free)
    assert text == text_of(tokens)
    assert decoder.assembly.engine.target.length <= shapes.max_length - 1

    stop = [text[-1] + "#"]  # a start of it, held back until the end is known
    assert run(decoder, max_new_tokens=100, stop=stop) == (tokens, text, reason)


@policies
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_models_own_context_is_a_limit_too(perfect_pair, policy, role):
    model = getattr(perfect_pair, role)
    short = perfect_pair._replace(**{role: replace(model, sizes=replace(model.sizes, max_context=33))})

    assert run(short.decoder(policy), max_new_tokens=100)[::2] == (perfect_pair.reference(PROMPT, 13), "context")


@policies
def test_prompts_around_the_prefill_widths(perfect_pair, policy):
    shapes = Shapes(
        max_length=60, draft_widths=(1, 4), max_depth=4, candidates=4, verify_widths=(1, 8, 16), prefill_widths=(4, 16)
    )
    decoder = perfect_pair.decoder(policy, shapes)
    for length in (1, 3, 4, 5, 15, 16, 17, 32, 33, 59):
        prompt, longest = TEXT[:length], 60 - length
        tokens, _, reason = run(decoder, prompt, max_new_tokens=6)

        assert tokens == perfect_pair.reference(prompt, min(6, longest))
        assert reason == ("length" if longest >= 6 else "context")


def test_a_request_never_started_was_cancelled(pair):
    result = pair.decoder(BLOCK).start(PROMPT).result()

    assert (result.tokens, result.text, result.finish_reason) == ([], "", "cancelled")


def test_the_example_of_a_character_that_spans_tokens():
    """One emoji is four tokens here; the stream shows it when it is whole, and never shows a part."""
    tokens = byte_tokenizer()("a😀b")["input_ids"]
    stream = TextStream(byte_tokenizer(), frozenset(), 100, [])
    pieces = []
    for token in tokens:
        stream.push([token])
        pieces.append(stream.release())

    assert pieces == ["a", "", "", "", "😀", "b"]


@examples(150)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=24), st.data())
def test_the_text_is_what_the_tokens_decode_to(tokens, data):
    """Also where it ends within a character, and whatever blocks the tokens came in."""
    stream, pieces, left = TextStream(byte_tokenizer(), frozenset(), len(tokens), []), "", list(tokens)
    while left:
        count = data.draw(st.integers(1, len(left)))
        stream.push(left[:count])
        pieces += stream.release()
        left = left[count:]

    assert stream.finish_reason == "length"
    assert stream.text == pieces == byte_tokenizer().decode(tokens, skip_special_tokens=True)


@policies
def test_who_reads_no_piece_is_given_the_text_of_the_pieces(perfect_pair, policy):
    """Tokens, text and end; pieces are made for those who iterate alone."""
    decoder = perfect_pair.decoder(policy)
    for count in (1, 2, 17, 40):
        request = decoder.start(PROMPT, max_new_tokens=count)
        pieces = list(request)
        streamed, whole = request.result(), decoder.generate(PROMPT, max_new_tokens=count)

        assert (whole.tokens, whole.text, whole.finish_reason) == (streamed.tokens, "".join(pieces), "length")
        assert whole.metrics.iterations == streamed.metrics.iterations


def special_text(tokens):
    return byte_tokenizer().decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("stop", ["<end>", "d>", "b<end>", "b<end>c", "nd>cd", "<end><end>", "on<end>"])
def test_stop_strings_see_special_tokens_and_the_text_does_not(stop, include_stop):
    tokenizer = byte_tokenizer()
    tokens = tokenizer("ab<end>cd<end><end>on<end>x")["input_ids"]
    stream, pieces = TextStream(tokenizer, frozenset(), 100, [stop], include_stop=include_stop), ""
    for token in tokens:
        stream.push([token])
        pieces += stream.release()

    whole = special_text(stream.tokens)
    place = whole.index(stop)
    shown = whole[: place + len(stop) * include_stop]
    for part in ("<end>", *(["<e", "<", "<en"] if not include_stop else [])):  # cut within a special token
        shown = shown.removesuffix(part) if part != "<end>" else shown.replace(part, "")
    assert stream.finish_reason == "stop"
    assert stop not in special_text(stream.tokens[:-1])
    assert stream.text == pieces == shown


@policies
def test_an_end_token_that_is_ignored_still_completes_a_stop_string(perfect_pair, policy):
    """``<end>`` is token 0; the pair's text is moved so that one of its tokens is it."""
    tokens = perfect_pair.reference(PROMPT, 41)
    tokenizer = copy.deepcopy(byte_tokenizer())
    mark = tokenizer.convert_ids_to_tokens(tokens[17])
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(mark, special=True, normalized=False)]})
    decoder = perfect_pair.decoder(policy, eos=[tokens[17]])
    decoder.tokenizer = tokenizer
    found = decoder.generate(PROMPT, max_new_tokens=41, ignore_eos=True, stop=[mark])

    assert found.finish_reason == "stop"
    assert found.tokens == tokens[: tokens.index(tokens[17]) + 1]
    assert mark not in found.text


def test_ends_come_from_every_place_that_names_one(tmp_path):
    tokenizer = chat_tokenizer()
    assert end_tokens(str(tmp_path), 7, tokenizer) == {0, 7}
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert end_tokens(str(tmp_path), 7, tokenizer) == {0, 5, 6, 7}


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "x"}', '{"eos_token_id": [null]}', "[]", "{", '{"eos_token_id": 3.5}']
)
def test_ends_that_are_none_are_refused_by_file(tmp_path, content):
    """Left out, the text would run on behind its end."""
    (tmp_path / "generation_config.json").write_text(content)

    with pytest.raises(YggdrasilError, match=r"generation_config\.json (is .*, no token|could not be read: \S)"):
        end_tokens(str(tmp_path), None, chat_tokenizer())


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m['content'] }}<end>\n{% endfor %}", {0}),
        ("{% for m in messages %}{{ m['content'] }} <end>{% endfor %}", {0}),
        ("{% for m in messages %}<end>{{ m['content'] }}\n{% endfor %}", set()),
        ("{{ raise_exception('no') }}", set()),
        (None, set()),
    ],
)
def test_a_template_names_the_token_behind_an_answer(template, ends):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = template

    assert template_end_tokens(tokenizer) == ends
