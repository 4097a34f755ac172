"""Streaming responses: framing of JSON objects, and a response with a callback for its end."""

import json
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from typing import Any, NamedTuple

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from yggdrasil.serving.errors import ClientGone, Fault

DONE = b"data: [DONE]\n\n"
# OpenAPI ``responses`` of a route that may stream.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_MARK = "\x00the text\x00"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(data: dict[str, Any]) -> bytes:
    """Encode ``data`` as one server-sent event, in ASCII, because some clients treat U+2028 as a line end."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


def named_frame(data: dict[str, Any]) -> bytes:
    """Encode ``data`` as one server-sent event: the line ``event: `` with ``data["type"]``, then ``data`` as JSON."""
    return f"event: {data['type']}\n".encode("ascii") + frame(data)


def line(data: dict[str, Any]) -> bytes:
    """Encode ``data`` as one line of JSON (NDJSON)."""
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"


class TextFrames:
    """Encodes server-sent events that differ only in one text, and serialises everything else once.

    ``chunk_of`` builds the chunk of a text.
    """

    def __init__(self, chunk_of: Callable[[str], dict[str, Any]]) -> None:
        self._chunk_of = chunk_of

    def __call__(self, text: str) -> bytes:
        """Return the server-sent event of the chunk with this ``text``."""
        before, _, after = self._around
        return before + json.dumps(text).encode("ascii") + after

    @cached_property
    def _around(self) -> tuple[bytes, bytes, bytes]:
        return frame(self._chunk_of(_MARK)).partition(json.dumps(_MARK).encode("ascii"))


class Framing(NamedTuple):
    """Wire format of a stream: encoder of objects, conversion of a fault to an object, and the end mark."""

    frame: Callable[[dict[str, Any]], bytes]
    fault: Callable[[Fault], dict[str, Any]]
    end: bytes = b""
    media_type: str = "text/event-stream"


CHUNKS = Framing(frame, Fault.body, DONE)  # OpenAI's chat completions and completions
LINES = Framing(line, lambda fault: {"error": fault.message}, media_type="application/x-ndjson")  # Ollama


class EventStream(StreamingResponse):
    """Response that streams ``chunks``, then the end mark. Each list of ``chunks`` is sent as one write.

    ``on_end`` is called at the end of the stream, also if the client disconnects or an error occurs.
    """

    def __init__(
        self, chunks: AsyncIterator[list[dict[str, Any]]], on_end: Callable[[], None], framing: Framing = CHUNKS
    ) -> None:
        super().__init__(_framed(chunks, framing), media_type=framing.media_type, headers=_HEADERS)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)  # ``chunks`` raises ClientGone if the client disconnects
        finally:
            self._on_end()


async def _framed(chunks: AsyncIterator[list[dict[str, Any]]], framing: Framing) -> AsyncIterator[bytes]:
    try:
        async for together in chunks:
            if together:
                yield b"".join(map(framing.frame, together))
    except Fault as fault:  # the status was already sent: report the error in the stream
        yield framing.frame(framing.fault(fault))
    except ClientGone:
        return
    yield framing.end
