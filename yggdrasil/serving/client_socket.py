"""Writes to a client's socket from the decoder's thread, so that the event loop is not woken for each piece of text."""

from asyncio import Transport
from collections.abc import Callable
from time import monotonic
from typing import Any

from fastapi import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

# Minimum seconds between two sends of text (an iteration may take longer). Each send wakes the client, and a client on
# the same machine takes time from the cores that decode.
GATHER_SECONDS = 0.03
_NAME = "yggdrasil.transport"

Frame = Callable[[str], bytes]  # encodes a text as the bytes to send


class OpenProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with the connection's transport added to the extensions of every request's scope."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        served: Any = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await served({**scope, "extensions": {_NAME: transport}}, receive, send)

        self.app = app


class SocketWriter:
    """Non-blocking writer of one chunked reply, used while the event loop sends nothing. Call ``close`` at the end."""

    def __init__(self, transport: Transport, frame: Frame) -> None:
        self._transport, self._frame = transport, frame
        # NOTE: duplicated, as the loop may close its descriptor and the number may then be another client's.
        self._socket = transport.get_extra_info("socket").dup()
        self._left = b""
        self._due = 0.0

    @classmethod
    def of(cls, request: Request, frame: Frame) -> "SocketWriter | None":
        """Return a writer of the reply to ``request``; None if the request is not HTTP/1.1 or its transport is unknown.

        Args:
            frame: encodes a text as the bytes to send.
        """
        transport = request.scope.get("extensions", {}).get(_NAME)
        return None if transport is None or request.scope["http_version"] != "1.1" else cls(transport, frame)

    def open(self) -> bool:
        """Start to gather text for 0.03 s, and return whether ``send`` may be called.

        It may if the connection is open and the event loop has written all that it had to write.
        """
        self._due = monotonic() + GATHER_SECONDS
        return not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    def is_due(self) -> bool:
        """Return whether text may be sent: 0.03 s have passed since the last ``open`` or ``send``."""
        return monotonic() >= self._due

    def send(self, text: str) -> bool:
        """Send ``text`` as one chunk without blocking, and return whether the socket accepted all of it.

        ``give_back`` passes the unsent rest to the event loop.
        """
        data = self._frame(text)
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        try:
            sent = self._socket.send(chunk)
        except OSError:  # the socket is full or broken: the loop's own write finds out which
            sent = 0
        self._left = chunk[sent:]
        self._due = monotonic() + GATHER_SECONDS
        return not self._left

    def give_back(self) -> None:
        """Return the connection to the event loop, which first writes the rest that ``send`` could not send."""
        if self._left:
            self._transport.write(self._left)
            self._left = b""

    def close(self) -> None:
        """Close the duplicated socket. No method may be called afterwards."""
        self._socket.close()
