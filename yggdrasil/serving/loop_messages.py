"""Events from the decoder's thread to an event loop, which is woken for them only where it does not poll."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from threading import Lock

from yggdrasil.serving.client_socket import SocketWriter
from yggdrasil.serving.jobs import Event, Piece

NumberedEvent = tuple[int, Event]  # with the number of the answer


class EventChannel:
    """Carries the events of one request from any thread to the event loop that created the channel.

    Waking a loop costs a third of a millisecond on both cores while they decode. So a loop that rests is not woken:
    it joins the pieces that it finds when its rest ends. With a socket writer the loop sleeps, and the thread that puts
    a piece sends it. An event that ends an answer always wakes the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()  # of the events and the outlet: whoever has it is the one who sends
        self._events: deque[NumberedEvent] = deque()
        self._outlet: SocketWriter | None = None
        self._is_awaited = self._is_resting = self._is_urgent = False
        self._alarm: asyncio.Future[None] | None = None

    def put(self, number: int, event: Event) -> None:
        """Add an event, or send it through the socket writer. Never blocks."""
        with self._lock:
            self._events.append((number, event))
            if not isinstance(event, Piece):
                self._is_urgent = True
            elif self._outlet is not None and not self._is_urgent:
                if self._send_straight(self._outlet):
                    return
                self._outlet, self._is_urgent = None, True  # the loop first sends what is left
            elif not self._is_awaited:
                return
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._ring)

    def _send_straight(self, outlet: SocketWriter) -> bool:
        """Whether the client's socket has all that is due."""
        if not outlet.is_due():
            return True
        text = "".join(event.text for _, event in self._events if isinstance(event, Piece))
        self._events.clear()
        return outlet.send(text)

    async def first(self) -> NumberedEvent:
        """The first event, as soon as there is one; it stays."""
        self._is_awaited = True  # before the look: what is left behind it rings
        while not self._events:
            await self._sleep()
        self._is_awaited = False
        return self._events[0]

    async def take(self) -> list[NumberedEvent]:
        """All events, as soon as there is one."""
        await self.first()
        with self._lock:
            self._is_urgent = False
            taken = list(self._events)
            self._events.clear()
        return list(_joined(taken))

    async def rest(self, seconds: float) -> None:
        """Let pieces gather, unless there is more than pieces."""
        self._is_resting = True
        timer = self._loop.call_later(seconds, self._end_rest)
        while self._is_resting and not self._is_urgent:
            await self._sleep()
        timer.cancel()
        self._is_resting = False

    async def hand_over(self, outlet: SocketWriter) -> None:
        """Have pieces sent by whoever puts them, until there is more than pieces or the socket takes no more."""
        with self._lock:
            self._outlet = outlet
        try:
            while not self._is_urgent:
                await self._sleep()
        finally:
            with self._lock:
                self._outlet = None

    def _end_rest(self) -> None:
        self._is_resting = False
        self._ring()

    async def _sleep(self) -> None:
        self._alarm = self._loop.create_future()
        await self._alarm

    def _ring(self) -> None:
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)


def _joined(posted: list[NumberedEvent]) -> Iterator[NumberedEvent]:
    """The same with pieces of one answer that follow each other as one."""
    for (number, _), group in groupby(posted, lambda each: (each[0], isinstance(each[1], Piece))):
        events = [event for _, event in group]
        pieces = [event for event in events if isinstance(event, Piece)]
        for event in [Piece.joined(pieces)] if pieces else events:
            yield number, event
