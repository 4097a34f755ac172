"""Passes events from the decoder's thread to an asyncio event loop with as few wake-ups as possible."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from threading import Lock

from yggdrasil.serving.client_socket import SocketWriter
from yggdrasil.serving.jobs import Event, Piece

NumberedEvent = tuple[int, Event]  # (answer index, event)


class EventChannel:
    """Thread-safe channel of one request's events to the event loop that created it.

    Waking the loop takes about 0.3 ms while two cores decode. So a piece does not wake a loop in ``rest``; the next
    ``take`` joins the pieces. During ``hand_over``, the thread that puts a piece also sends its text. An event that
    ends an answer always wakes the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()  # guards the events and the outlet; held while sending
        self._events: deque[NumberedEvent] = deque()
        self._outlet: SocketWriter | None = None
        self._is_awaited = self._is_resting = self._is_urgent = False
        self._alarm: asyncio.Future[None] | None = None

    def put(self, number: int, event: Event) -> None:
        """Add an event of the answer with index ``number``, or send its text through the socket writer; never blocks.

        Any thread may call it.
        """
        with self._lock:
            self._events.append((number, event))
            if not isinstance(event, Piece):
                self._is_urgent = True
            elif self._outlet is not None and not self._is_urgent:
                if self._send_straight(self._outlet):
                    return
                self._outlet, self._is_urgent = None, True  # the loop must write the unsent rest first
            elif not self._is_awaited:
                return
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._ring)

    def _send_straight(self, outlet: SocketWriter) -> bool:
        """Send the gathered pieces if they are due. Return False if the socket did not accept all of them."""
        if not outlet.is_due():
            return True
        text = "".join(event.text for _, event in self._events if isinstance(event, Piece))
        self._events.clear()
        return outlet.send(text)

    async def first(self) -> NumberedEvent:
        """Wait for the first event and return it without removing it."""
        self._is_awaited = True  # set before the check: an event that is put after it wakes the loop
        while not self._events:
            await self._sleep()
        self._is_awaited = False
        return self._events[0]

    async def take(self) -> list[NumberedEvent]:
        """Wait for events, and remove and return all as (answer index, event); consecutive pieces are joined."""
        await self.first()
        with self._lock:
            self._is_urgent = False
            taken = list(self._events)
            self._events.clear()
        return list(_joined(taken))

    async def rest(self, seconds: float) -> None:
        """Sleep for ``seconds`` while pieces of text gather. Return early if an event arrives that ends an answer."""
        self._is_resting = True
        timer = self._loop.call_later(seconds, self._end_rest)
        while self._is_resting and not self._is_urgent:
            await self._sleep()
        timer.cancel()
        self._is_resting = False

    async def hand_over(self, outlet: SocketWriter) -> None:
        """Let the decoder's thread send text through ``outlet`` until an answer ends or the socket accepts no more."""
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
    """Yield the events with consecutive pieces of one answer joined."""
    for (number, _), group in groupby(posted, lambda each: (each[0], isinstance(each[1], Piece))):
        events = [event for _, event in group]
        pieces = [event for event in events if isinstance(event, Piece)]
        for event in [Piece.joined(pieces)] if pieces else events:
            yield number, event
