"""Text that the decoder's thread sends itself: all of it, in order, whatever the client's socket takes."""

import asyncio
import random
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from bundled_server import chunks_of, until_done, wait_until

from yggdrasil.serving import client_socket as module
from yggdrasil.serving.client_socket import SocketWriter
from yggdrasil.serving.jobs import Finished, Piece
from yggdrasil.serving.loop_messages import EventChannel
from yggdrasil.serving.streams import TextFrames, frame

CHAT = [{"role": "user", "content": "Count to a hundred"}]
LONG = {"messages": CHAT, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def sends(monkeypatch):
    """What goes out straight, an iteration's text at a time."""
    taken, send = [], SocketWriter.send
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(SocketWriter, "send", lambda self, text: taken.append(text) or send(self, text))
    return taken


def texts(chunks):
    return [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]


def test_a_stream_is_the_same_whoever_sends_it(server, sends):
    whole = server.post("/v1/chat/completions", **LONG)["choices"][0]["message"]["content"]
    assert sends == []
    straight = server.stream("/v1/chat/completions", **LONG)
    assert len(sends) > 10
    assert "".join(texts(straight)) == whole
    shown = server.stream("/v1/chat/completions", **LONG, logprobs=True)  # the loop's
    assert "".join(texts(shown)) == whole
    keys = {(*chunk, *chunk["choices"][0], *chunk["choices"][0]["delta"]) for chunk in shown}
    assert {(*chunk, *chunk["choices"][0], *chunk["choices"][0]["delta"]) for chunk in straight} == keys


def test_completions_are_sent_straight_too(server, sends):
    body = {"prompt": "def f(", "max_tokens": 60, "ignore_eos": True, "echo": True}
    whole = server.post("/v1/completions", **body)["choices"][0]["text"]
    chunks = server.stream("/v1/completions", **body, stream_options={"include_usage": True})

    assert sends
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_old_clients_get_no_chunks(server, sends):
    with server.slow_stream(b"1.0", **LONG) as client:
        head, _, body = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert sends == []
    assert body.endswith(b"data: [DONE]\n\n")
    assert len(body.split(b"\n\n")) == len(chunks_of(body)) + 2


def test_what_a_full_socket_does_not_take_is_sent_later(server, sends, monkeypatch):
    """A client that reads nothing until its answer is whole gets all of it all the same."""
    refused, opened, give_back = [], SocketWriter.open, SocketWriter.give_back

    def open_with_little_room(self):
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return opened(self)

    monkeypatch.setattr(SocketWriter, "open", open_with_little_room)
    monkeypatch.setattr(SocketWriter, "give_back", lambda self: refused.append(bool(self._left)) or give_back(self))
    done = server.worker.meters.answers.labels("length")._value
    body = {**LONG, "max_tokens": 160}
    whole = server.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    before = done.get()
    with server.slow_stream(buffer_bytes=4096, **body) as client:
        wait_until(lambda: done.get() == before + 1)
        reply = until_done(client)

    assert any(refused)
    assert "".join(texts(chunks_of(reply))) == whole


class Fickle:
    """Takes no more now and then; what it did not take is sent when it is given back."""

    def __init__(self, seed):
        self.sent, self._left, self._chosen = [], "", random.Random(seed)

    def is_due(self):
        return self._chosen.random() < 0.7

    def send(self, text):
        taken = self._chosen.randrange(len(text) + 1) if self._chosen.random() < 0.1 else len(text)
        self.sent.append(text[:taken])
        self._left = text[taken:]
        return not self._left

    def give_back(self):
        self.sent.append(self._left)
        self._left = ""


def test_nothing_is_lost_between_two_that_send():
    letters = [chr(ord("a") + i % 26) for i in range(2000)]

    async def read(seed):
        post, outlet = EventChannel(), Fickle(seed)

        def write():
            for i, text in enumerate(letters):
                post.put(0, Piece(text))
                if i % 50 == 0:
                    time.sleep(random.Random(i).uniform(0, 0.001))
            post.put(0, Finished(None))

        threading.Thread(target=write).start()
        while True:
            for _, event in await post.take():
                if isinstance(event, Finished):
                    return outlet.sent
                outlet.sent.append(event.text)
            await post.hand_over(outlet)
            outlet.give_back()

    for seed in range(5):
        assert "".join(asyncio.run(read(seed))) == "".join(letters)


@pytest.mark.parametrize("text", ["", "a", 'quotes " and \\', "line\nend\u2028", "é \U0001f600 \ud83d", "\x00"])
def test_a_frame_is_as_if_written_whole(text):
    def chunk_of(text):
        return {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}

    assert TextFrames(chunk_of)(text) == frame(chunk_of(text))


def test_what_comes_within_a_moment_goes_out_together(monkeypatch):
    now, near, far = [100.0], *socket.socketpair()
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    transport = SimpleNamespace(
        get_extra_info=lambda name: near, is_closing=lambda: False, get_write_buffer_size=lambda: 0
    )

    async def write():
        post, outlet, arrived = EventChannel(), SocketWriter(transport, str.encode), []
        assert outlet.open()
        holder = asyncio.ensure_future(post.hand_over(outlet))
        await asyncio.sleep(0)
        for number in range(8):
            now[0] += module.GATHER_SECONDS * 0.3
            post.put(0, Piece(str(number)))
            arrived.append(_now_there(far))
        post.put(0, Finished(None))
        await holder
        outlet.close()
        return arrived

    with near, far:
        assert asyncio.run(write()) == [b"", b"", b"", b"4\r\n0123\r\n", b"", b"", b"", b"4\r\n4567\r\n"]


def _now_there(end):
    try:
        return end.recv(4096, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""
