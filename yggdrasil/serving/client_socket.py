"""Writes a client's socket from the decoder's thread, so that no other thread is woken for each piece of text."""

from asyncio import Transport
from collections.abc import Callable
from time import monotonic
from typing import Any

from fastapi import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

# Text of so many seconds goes out together, or that of one iteration where it takes longer. A client on this machine
# takes a moment of the cores that decode for each time that bytes come.
GATHER_SECONDS = 0.03
_NAME = "yggdrasil.transport"

Frame = Callable[[str], bytes]  # what is sent of a text


class OpenProtocol(H11Protocol):
    """uvicorn's protocol, which adds the connection's transport to the extensions of every request."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        served: Any = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await served({**scope, "extensions": {_NAME: transport}}, receive, send)

        self.app = app


class SocketWriter:
    """Sends text of one chunked reply while the event loop sends nothing. Its creator closes it."""

    def __init__(self, transport: Transport, frame: Frame) -> None:
        self._transport, self._frame = transport, frame
        # NOTE: of its own, since a number that the loop has closed may be another client's a moment later.
        self._socket = transport.get_extra_info("socket").dup()
        self._left = b""
        self._due = 0.0

    @classmethod
    def of(cls, request: Request, frame: Frame) -> "SocketWriter | None":
        """That of the request's reply, where it will be in chunks and the server shows its transport."""
        transport = request.scope.get("extensions", {}).get(_NAME)
        return None if transport is None or request.scope["http_version"] != "1.1" else cls(transport, frame)

    def open(self) -> bool:
        """Whether all that the loop has sent is on its way, so that more may follow; text has just been sent."""
        self._due = monotonic() + GATHER_SECONDS
        return not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    def is_due(self) -> bool:
        """Whether what has gathered is to be sent."""
        return monotonic() >= self._due

    def send(self, text: str) -> bool:
        """Send what of a text the socket takes at once; whether that was all of it. Never waits."""
        data = self._frame(text)
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        try:
            sent = self._socket.send(chunk)
        except OSError:  # it takes nothing now, or never will: the loop finds out which
            sent = 0
        self._left = chunk[sent:]
        self._due = monotonic() + GATHER_SECONDS
        return not self._left

    def give_back(self) -> None:
        """The loop sends again: what is left first."""
        if self._left:
            self._transport.write(self._left)
            self._left = b""

    def close(self) -> None:
        """Nobody sends by it any more."""
        self._socket.close()
