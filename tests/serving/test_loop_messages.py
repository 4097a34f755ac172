"""Events on their way from a thread to an event loop: none lost, in order, pieces together, ends at once."""

import asyncio
import random
import threading

from yggdrasil.serving.jobs import Finished, Piece
from yggdrasil.serving.loop_messages import EventChannel

LONG = 600.0  # seconds: whoever rests as long does not wake by itself here


def test_pieces_that_come_while_the_loop_rests_are_one():
    async def read():
        post = EventChannel()
        post.put(0, Piece("a", ["x"]))
        first = await post.take()
        post.put(0, Piece("b", ["y"], ["tree"]))
        post.put(0, Piece("c", ["z"]))
        post.put(1, Piece("d"))
        await post.rest(0.001)
        return first, await post.take()

    first, then = asyncio.run(read())
    assert first == [(0, Piece("a", ["x"]))]
    assert then == [(0, Piece("bc", ["y", "z"], ["tree"])), (1, Piece("d"))]


def test_an_end_wakes_and_a_piece_does_not():
    async def read():
        post = EventChannel()
        resting = asyncio.ensure_future(post.rest(LONG))
        await asyncio.sleep(0)
        for text in ("a", "b"):
            post.put(0, Piece(text))
        for _ in range(5):
            await asyncio.sleep(0)
        was_left_alone = not resting.done()
        threading.Thread(target=post.put, args=(0, Finished(None))).start()
        await resting
        await post.rest(LONG)  # what is urgent is there: no rest at all
        return was_left_alone, await post.take()

    was_left_alone, taken = asyncio.run(read())
    assert was_left_alone
    assert taken == [(0, Piece("ab", [], [])), (0, Finished(None))]


def test_nothing_is_lost_between_two_threads():
    """A thread that writes in bursts, and a loop that rests or waits: it ends only if every wake-up came."""
    texts = [chr(ord("a") + i % 26) for i in range(3000)]

    async def read():
        post = EventChannel()

        def write():
            pause = threading.Event()
            for i, text in enumerate(texts):
                post.put(0, Piece(text))
                if i % 50 == 0:
                    pause.wait(random.Random(i).uniform(0, 0.002))
            post.put(0, Finished(None))

        threading.Thread(target=write).start()
        found = []
        while not found or isinstance(found[-1], Piece):
            found += [event for _, event in await post.take()]
            if isinstance(found[-1], Piece):
                await post.rest(0.0005)
        return found

    *pieces, _ = asyncio.run(read())
    assert "".join(piece.text for piece in pieces) == "".join(texts)
