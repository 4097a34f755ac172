"""Server-sent events: framing, and a response that gives up its answers however it ends."""

import json
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from typing import Any, NamedTuple

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from yggdrasil.serving.errors import ClientGone, Fault

DONE = b"data: [DONE]\n\n"
# What the OpenAPI document says of a route that may stream.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_MARK = "\x00the text\x00"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(data: dict[str, Any]) -> bytes:
    """One event. In ASCII, so that no reader takes a separator inside a text for the end of a line."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


def named_frame(data: dict[str, Any]) -> bytes:
    """One server-sent event with an ``event`` line that repeats the ``type`` of ``data``."""
    return f"event: {data['type']}\n".encode("ascii") + frame(data)


def line(data: dict[str, Any]) -> bytes:
    """One object on a line of its own."""
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"


class TextFrames:
    """Frames that differ in one text: what they share is written once."""

    def __init__(self, chunk_of: Callable[[str], dict[str, Any]]) -> None:
        self._chunk_of = chunk_of

    def __call__(self, text: str) -> bytes:
        """As ``frame(chunk_of(text))``."""
        before, _, after = self._around
        return before + json.dumps(text).encode("ascii") + after

    @cached_property
    def _around(self) -> tuple[bytes, bytes, bytes]:
        return frame(self._chunk_of(_MARK)).partition(json.dumps(_MARK).encode("ascii"))


class Framing(NamedTuple):
    """How a stream's objects are sent: each one's bytes, an object for a fault, and what comes behind the last."""

    frame: Callable[[dict[str, Any]], bytes]
    fault: Callable[[Fault], dict[str, Any]]
    end: bytes = b""
    media_type: str = "text/event-stream"


def _named_fault(fault: Fault) -> dict[str, Any]:
    said = {"message": fault.message, "code": fault.code, "param": fault.param}
    return {"type": "error", "sequence_number": 0, **said}


CHUNKS = Framing(frame, Fault.body, DONE)  # as chats and completions
NAMED = Framing(named_frame, _named_fault)  # as OpenAI's responses
LINES = Framing(line, lambda fault: {"error": fault.message}, media_type="application/x-ndjson")  # as Ollama


class EventStream(StreamingResponse):
    """Sends ``chunks``, those known at once together, and the end mark.

    ``on_end`` is called when the last was sent or the client is gone.
    """

    def __init__(
        self, chunks: AsyncIterator[list[dict[str, Any]]], on_end: Callable[[], None], framing: Framing = CHUNKS
    ) -> None:
        super().__init__(_framed(chunks, framing), media_type=framing.media_type, headers=_HEADERS)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)  # whoever gives the chunks knows of a client that is gone
        finally:
            self._on_end()


async def _framed(chunks: AsyncIterator[list[dict[str, Any]]], framing: Framing) -> AsyncIterator[bytes]:
    try:
        async for together in chunks:
            if together:
                yield b"".join(map(framing.frame, together))
    except Fault as fault:  # the status is sent: what is left is an error inside the stream
        yield framing.frame(framing.fault(fault))
    except ClientGone:
        return
    yield framing.end
