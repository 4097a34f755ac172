"""Conversations that take turns on one decoder: each is read once, and its rows are those of a fresh pass."""

import mmap
import random

import pytest
import torch
from test_reuse import SETTINGS, TREE, as_fresh, assert_caches_are_fresh, settings
from tiny_pair import TEXT, VOCAB_SIZE

from yggdrasil.engine.conversations import Conversations
from yggdrasil.native.arena import Arena
from yggdrasil.runtime import kept_rows
from yggdrasil.runtime.kept_rows import KeptRows

PLENTY = 1 << 30
OPENINGS = [TEXT[:21], TEXT[30:52], [*TEXT[:10], *TEXT[60:75]]]  # the last begins as the first does


def turn(decoder, conversations, text, options, count=12):
    """One more answer to ``text``, which it prolongs; returns how much of it was read."""
    conversations.switch_to(text)
    found = decoder.generate(text, max_new_tokens=count, **options)
    read = len(text) - found.metrics.reused_tokens
    text += found.tokens
    return found, read


def held_bytes(decoder, num_rows):
    """What a text of ``num_rows`` tokens takes in both models' caches."""
    return sum(runner.cache.resident_bytes(num_rows) for runner in (decoder.assembly.target, decoder.assembly.drafter))


@settings
def test_interleaved_conversations_read_only_what_is_new(pair, policy, options):
    decoder = pair.decoder(policy)
    conversations = Conversations(decoder.assembly, PLENTY)
    texts = [list(opening) for opening in OPENINGS]
    runners = [decoder.assembly.target, decoder.assembly.drafter]
    left = {}  # rows of both models' caches when a conversation was left
    for number in range(3):
        for name, text in enumerate(texts):
            conversations.switch_to(text)
            assert [runner.text.shared(text) for runner in runners] >= left.get(name, [0, 0])
            text.extend(TEXT[number : number + 3])
            prompt = list(text)
            found, read = turn(decoder, conversations, text, options)
            # The new tokens, the answer's last, and what an answer's last block left unread.
            assert number == 0 or read <= 3 + 2
            assert found.tokens == as_fresh(pair, prompt, policy, options, 12)
            assert_caches_are_fresh(pair, decoder)
            left[name] = [runner.text.shared(text) for runner in runners]


def test_without_memory_only_the_last_text_is_there(pair):
    decoder = pair.decoder(TREE)
    conversations = Conversations(decoder.assembly, 0)
    first, second = list(OPENINGS[0]), list(OPENINGS[1])
    for text in (first, second):
        turn(decoder, conversations, text, {})

    assert turn(decoder, conversations, first, {})[1] == len(first) - 12
    assert conversations.num_bytes == 0


def test_rows_come_back_bit_by_bit(pair):
    decoder = pair.decoder(TREE)
    decoder.generate(OPENINGS[0], max_new_tokens=20)
    runner = decoder.assembly.target
    before, count = [each.clone() for each in runner.cache.tensors()], runner.text.num_rows
    kept = KeptRows.of(runner)
    decoder.generate(OPENINGS[1], max_new_tokens=30)
    kept.restore(runner)

    assert runner.text.num_rows == count == kept.text.num_rows
    for now, then in zip(runner.cache.tensors(), before, strict=True):
        assert torch.equal(now[:, :count], then[:, :count])


def test_the_least_recently_used_goes_first(pair):
    """Room for two: of three that were left, the first is read anew."""
    decoder = pair.decoder(TREE)
    texts = [[start, *TEXT[:39]] for start in range(4)]
    measured = Conversations(decoder.assembly, PLENTY)
    turn(decoder, measured, list(texts[0]), {})
    measured.switch_to(texts[1])
    assert len(measured) == 1
    decoder.forget()

    bound = int(2.5 * measured.num_bytes) + held_bytes(decoder, 52)
    conversations = Conversations(decoder.assembly, bound)
    for text in texts:
        turn(decoder, conversations, text, {})
    assert len(conversations) == 2
    assert turn(decoder, conversations, texts[1], {})[1] <= 2
    assert turn(decoder, conversations, texts[0], {})[1] == len(texts[0]) - 12
    assert conversations.num_bytes <= 2.5 * measured.num_bytes


def test_a_text_is_kept_once(pair):
    """A conversation that is left and taken up again and again has one copy, of its longest state."""
    decoder = pair.decoder(TREE)
    conversations = Conversations(decoder.assembly, PLENTY)
    first, second = list(OPENINGS[0]), list(OPENINGS[1])
    for _ in range(4):
        for text in (first, second):
            turn(decoder, conversations, text, {})
            assert len(conversations) <= 1


def test_what_was_kept_ahead_is_not_copied_again(pair, monkeypatch):
    """Its rows are those the caches held, and the next text finds them there."""
    decoder = pair.decoder(TREE)
    conversations = Conversations(decoder.assembly, PLENTY)
    first, second = list(OPENINGS[0]), list(OPENINGS[1])
    turn(decoder, conversations, first, {})
    conversations.copy_ahead(lambda: False)
    assert len(conversations) == 0  # somebody came before it was done
    conversations.copy_ahead(lambda: True)
    assert len(conversations) == 1
    with monkeypatch.context() as nothing_to_copy:
        nothing_to_copy.setattr(KeptRows, "of", None)
        conversations.copy_ahead(lambda: True)
        turn(decoder, conversations, second, {})
    prompt = list(first)
    found, read = turn(decoder, conversations, first, {})

    assert read <= 2
    assert found.tokens == as_fresh(pair, prompt, TREE, {}, 12)
    assert_caches_are_fresh(pair, decoder)


def test_keeping_ahead_pushes_no_other_text_out(pair):
    decoder = pair.decoder(TREE)
    conversations = Conversations(decoder.assembly, PLENTY)
    first, second = list(OPENINGS[0]), list(OPENINGS[1])
    for text in (first, second):
        turn(decoder, conversations, text, {})
    # Beside the present text there is memory for either copy, not for both.
    tight = Conversations(decoder.assembly, conversations.num_bytes * 3 // 2 + held_bytes(decoder, 36))
    decoder.forget()
    for text in (list(OPENINGS[0]), list(OPENINGS[1])):
        turn(decoder, tight, text, {})
    tight.copy_ahead(lambda: True)
    assert len(tight) == 1
    assert turn(decoder, tight, first[: len(OPENINGS[0])], {})[1] <= 2


def test_the_present_text_counts_too_once_its_answer_has_ended(pair):
    decoder = pair.decoder(TREE)
    conversations = Conversations(decoder.assembly, PLENTY)
    for text in (OPENINGS[0], OPENINGS[1]):
        turn(decoder, conversations, list(text), {})
    held = held_bytes(decoder, decoder.assembly.target.text.num_rows)
    for spare_bytes, count in ((0, 1), (-1, 0)):
        bounded = Conversations(decoder.assembly, held + conversations.num_bytes + spare_bytes)
        bounded._kept = list(conversations._kept)
        bounded.release_unused()
        assert len(bounded) == count


def test_copies_and_caches_stay_within_the_limit_when_a_long_text_follows(pair, monkeypatch):
    """Room is made before a prompt is read, by its length and that of the text which the caches still hold."""
    monkeypatch.setattr(Arena, "page", 1)
    decoder = pair.decoder(TREE)
    bound = held_bytes(decoder, 200)
    conversations = Conversations(decoder.assembly, bound)
    most = 0
    for number, length in enumerate((30, 50, 20, 120, 20, 90, 24, 40)):
        text = [number, *(TEXT * 2)[: length - 1]]
        held = held_bytes(decoder, decoder.assembly.target.text.num_rows)
        conversations.switch_to(text)
        assert conversations.num_bytes + max(held, held_bytes(decoder, length)) <= bound
        most = max(most, len(conversations))
        decoder.generate(text, max_new_tokens=4)
    assert most > 1


def test_whatever_else_the_process_holds_counts_too(pair):
    """Copies give way to memory that grew elsewhere; what the caches and the copies hold is counted once."""
    decoder = pair.decoder(TREE)
    elsewhere = 1000
    conversations: Conversations | None = None

    def process_bytes() -> int:
        if conversations is None:
            return 500
        return elsewhere + conversations.num_bytes + held_bytes(decoder, decoder.assembly.target.text.num_rows)

    bound = 500 + 3 * held_bytes(decoder, 40)
    conversations = Conversations(decoder.assembly, bound, process_bytes)
    for text in (OPENINGS[0], OPENINGS[1], OPENINGS[0]):
        turn(decoder, conversations, list(text), {})
    conversations.release_unused()
    kept = len(conversations)
    assert kept > 0
    elsewhere = 1000 + bound - conversations.num_bytes
    conversations.release_unused()
    assert len(conversations) < kept
    assert process_bytes() - 500 <= bound or len(conversations) == 0


def test_returned_slots_are_written_anew(pair, monkeypatch):
    """The memory behind a short text is returned; a longer one that takes its slots has the rows of a fresh pass."""
    monkeypatch.setattr(Arena, "page", mmap.PAGESIZE)
    decoder = pair.decoder(TREE)
    conversations = Conversations(decoder.assembly, PLENTY)
    long, short = list(TEXT[:70]), list(OPENINGS[1])
    turn(decoder, conversations, long, {}, count=60)
    turn(decoder, conversations, short, {})
    rows = decoder.assembly.target.cache.rows()
    assert any(each[:, 100:125].any() for each in rows)
    conversations.release_unused()
    assert not any(each[:, 100:125].any() for each in rows)
    assert_caches_are_fresh(pair, decoder)

    prompt = list(long)
    found, read = turn(decoder, conversations, long, {})
    assert read <= 2
    assert found.tokens == as_fresh(pair, prompt, TREE, {}, 12)
    assert_caches_are_fresh(pair, decoder)


def test_any_turns_under_any_bound_give_what_a_fresh_decoder_does(pair):
    """Texts go on, part, and come back in any order, with requests of every kind and whatever memory there is."""
    chosen = random.Random(4)
    kinds = [SETTINGS[name][1] for name in ("tree", "off", "sampling", "drawn")]
    for bound in (30_000, PLENTY):
        decoder = pair.decoder(TREE)
        conversations = Conversations(decoder.assembly, bound)
        texts = [list(OPENINGS[0])]
        for _ in range(10):
            base = chosen.choice(texts)
            text = [*base[: chosen.randint(1, len(base))], *(chosen.randrange(VOCAB_SIZE) for _ in range(3))][:80]
            texts.append(text)
            options, prompt = chosen.choice(kinds), list(text)
            found, _ = turn(decoder, conversations, text, options, count=8)
            if chosen.random() < 0.5:
                conversations.copy_ahead(lambda: True)
            if chosen.random() < 0.5:
                conversations.release_unused()
            assert found.tokens == as_fresh(pair, prompt, TREE, options, 8)
            assert_caches_are_fresh(pair, decoder)
            assert conversations.num_bytes <= bound


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_is_kept_outlives_a_failed_request(pair, monkeypatch, kind):
    decoder = pair.decoder(TREE)
    conversations = Conversations(decoder.assembly, PLENTY)
    first = list(OPENINGS[0])
    turn(decoder, conversations, first, {})
    target = decoder.assembly.engine.target
    conversations.switch_to(OPENINGS[1])
    with monkeypatch.context() as broken:
        broken.setattr(target, "verify", lambda width: (_ for _ in ()).throw(kind()))
        with pytest.raises(kind):
            decoder.generate(OPENINGS[1], max_new_tokens=12)
    prompt = list(first)
    found, read = turn(decoder, conversations, first, {})

    assert read <= 2
    assert found.tokens == as_fresh(pair, prompt, TREE, {}, 12)
    assert_caches_are_fresh(pair, decoder)


def test_copies_of_a_cards_entries_are_in_host_memory():
    elsewhere = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    for count in (0, 10):
        rows = kept_rows._new_rows(count, elsewhere)
        assert (rows.device.type, rows.dtype, rows.shape) == ("cpu", torch.bfloat16, (count,))
