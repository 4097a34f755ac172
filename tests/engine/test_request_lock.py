"""Several threads on one decoder: right tokens or a refusal, and nothing of another's request is touched."""

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
from tiny_pair import TEXT

from yggdrasil import SamplingParams, Speculation
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

TREE = FixedPolicy(TreeShape(2, 3, 8))
NUM_THREADS, ROUNDS = 8, 6
KINDS = [
    {},
    {"sampling": SamplingParams(logprobs=1)},
    {"speculation": Speculation(expansion=(2, 2))},
    {"speculation": False},
]


def in_threads(pair, decoder, ask):
    """Every thread asks for texts of its own, all at once; returns (right answers, refusals)."""
    barrier = Barrier(NUM_THREADS)

    def run(thread):
        right = refused = 0
        for number in range(ROUNDS):
            prompt = list(TEXT[thread : thread + 9 + number])
            barrier.wait(timeout=60)
            try:
                tokens = ask(prompt, KINDS[(thread + number) % len(KINDS)])
            except YggdrasilError as error:
                refused += "another request is under way on this decoder" in str(error)
            else:
                assert tokens == pair.reference(prompt, 12)
                right += 1
        return right, refused

    for thread in range(NUM_THREADS):
        for number in range(ROUNDS):
            pair.reference(TEXT[thread : thread + 9 + number], 12)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(run, range(NUM_THREADS)))
    return sum(right for right, _ in results), sum(refused for _, refused in results)


def test_eight_threads_are_right_or_refused(pair):
    """Whoever has the first turn keeps it until another was refused, however the threads are scheduled."""
    decoder, has_refused = pair.decoder(TREE), Event()

    def ask(prompt, kind):
        try:
            request = decoder.start(prompt, max_new_tokens=12, **kind)
            for _ in request:
                assert has_refused.wait(60)
        except YggdrasilError:
            has_refused.set()
            raise
        return request.result().tokens

    right, refused = in_threads(pair, decoder, ask)

    assert right >= ROUNDS  # somebody's turn it always is
    assert refused
    assert right + refused == NUM_THREADS * ROUNDS


def test_eight_threads_queue_where_they_ask_to(pair):
    decoder = pair.decoder(TREE)
    right, refused = in_threads(
        pair, decoder, lambda prompt, kind: decoder.generate(prompt, max_new_tokens=12, wait=True, **kind).tokens
    )

    assert (right, refused) == (NUM_THREADS * ROUNDS, 0)


def test_one_that_comes_in_between_is_refused_and_changes_nothing(pair):
    decoder = pair.decoder(TREE)
    first = iter(decoder.start(TEXT[:20], max_new_tokens=30))
    pieces = [next(first), next(first)]
    for ask in (decoder.generate, lambda prompt: list(decoder.stream(prompt)), lambda _: decoder.forget()):
        with pytest.raises(YggdrasilError, match=r"another request is under way.*or queue with wait=True"):
            ask(TEXT[40:60])
    with pytest.raises(YggdrasilError, match="this thread's own request is under way"):
        decoder.generate(TEXT[40:60], wait=True)
    pieces += first

    assert "".join(pieces) == decoder.generate(TEXT[:20], max_new_tokens=30).text
    assert decoder.tokenizer.decode(pair.reference(TEXT[:20], 30)) == "".join(pieces)


@pytest.mark.parametrize("end", ["dropped", "closed", "asked for its result", "broken off"])
def test_a_turn_ends_however_the_request_does(pair, end):
    decoder = pair.decoder(TREE)
    request = decoder.start(TEXT[:20], max_new_tokens=30)
    if end == "broken off":
        for _ in request:
            break
    else:
        pieces = iter(request)
        next(pieces)
        if end == "closed":
            pieces.close()
        elif end == "asked for its result":
            assert request.result().finish_reason == "cancelled"
            assert list(pieces) == []
        else:
            del pieces
            gc.collect()

    assert decoder.generate(TEXT[:20], max_new_tokens=12).tokens == pair.reference(TEXT[:20], 12)


def test_a_request_is_iterated_once(pair):
    request = pair.decoder(TREE).start(TEXT[:20], max_new_tokens=5)
    list(request)
    with pytest.raises(YggdrasilError, match="a request is iterated once"):
        list(request)
    assert request.result().tokens == pair.reference(TEXT[:20], 5)


def test_a_second_iterator_takes_no_turn_away(pair):
    decoder = pair.decoder(TREE)
    request = decoder.start(TEXT[:20], max_new_tokens=30)
    first = iter(request)
    next(first)
    with pytest.raises(YggdrasilError):
        next(iter(request))
    assert request.result().finish_reason == "cancelled"

    assert decoder.generate(TEXT[:20], max_new_tokens=12).tokens == pair.reference(TEXT[:20], 12)
    ended = decoder.start(TEXT[:20], max_new_tokens=5)
    ended.result()
    with pytest.raises(YggdrasilError, match="a request is iterated once"):
        list(ended)


def test_requests_made_together_and_run_one_after_the_other(pair):
    """What is set up when a request is made is not the next one's."""
    decoder = pair.decoder(TREE)
    drawn = [
        decoder.start(
            TEXT[:20], max_new_tokens=20, speculation=Speculation("sequoia", expansion=expansion),
            sampling=SamplingParams(temperature=1.0, seed=seed),
        )
        for seed, expansion in ((1, (2, 1)), (2, (1, 1, 1)))
    ]  # fmt: skip
    for request in drawn:
        list(request)
    alone = [
        pair.decoder(TREE).generate(
            TEXT[:20], max_new_tokens=20, speculation=Speculation("sequoia", expansion=expansion),
            sampling=SamplingParams(temperature=1.0, seed=seed),
        ).tokens
        for seed, expansion in ((1, (2, 1)), (2, (1, 1, 1)))
    ]  # fmt: skip

    assert [request.result().tokens for request in drawn] == alone
