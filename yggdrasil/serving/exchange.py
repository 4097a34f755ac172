"""One HTTP request's answers: asked for, waited for, and given up when the client goes away."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fastapi import Request

from yggdrasil.engine.options import RequestOptions
from yggdrasil.serving.faults import ClientGone
from yggdrasil.serving.jobs import Ask, Event, Failed, Finished, Job
from yggdrasil.serving.worker import Worker


class Wanted(NamedTuple):
    """A prompt and how it is to be continued."""

    prompt: Sequence[int]
    options: RequestOptions
    shows_trees: bool = False
    scores: int | None = None  # as in ``Job``


class Exchange:
    """The answers of one request, event by event, each with its number. Whoever made it closes it, or has it end."""

    def __init__(self, worker: Worker, request: Request, wanted: Sequence[Wanted], *, is_streamed: bool) -> None:
        """Join the line; without ``is_streamed`` there are results alone.

        Raises:
            Fault: it is full or closed.
        """
        self._worker, self._request = worker, request
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event | ClientGone]] = asyncio.Queue()
        self._left = len(wanted)
        self._first: tuple[int, Event] | None = None
        jobs = [
            Job(each.prompt, each.options, self._emitter(i), is_streamed, each.shows_trees, each.scores)
            for i, each in enumerate(wanted)
        ]
        client = request.client.host if request.client is not None else ""
        self._ask = Ask(client, jobs)
        worker.submit(self._ask)
        self._watch = asyncio.ensure_future(self._until_gone())

    def _emitter(self, index: int) -> Callable[[Event], None]:
        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(partial(self._events.put_nowait, (index, event)))

        return emit

    async def begin(self) -> None:
        """Wait for the first event, before which nothing should be answered.

        Raises:
            Fault: the request failed.
            ClientGone: the client did not wait.
        """
        self._first = await self._next()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """All events, each with the number of its answer.

        Raises:
            Fault: an answer failed; the others are given up.
            ClientGone: the client did not wait.
        """
        if self._first is not None:
            yield self._first
        while self._left:
            yield await self._next()
        self.close()

    async def results(self) -> list[Finished]:
        """All answers.

        Raises:
            Fault, ClientGone: as ``events``.
        """
        found = {index: event async for index, event in self.events() if isinstance(event, Finished)}
        return [found[index] for index in sorted(found)]

    def close(self) -> None:
        """Give up what is not answered yet."""
        self._watch.cancel()
        self._worker.cancel(self._ask)

    async def _next(self) -> tuple[int, Event]:
        try:
            index, event = await self._events.get()
            if isinstance(event, ClientGone):
                raise event
            if isinstance(event, Failed):
                raise event.fault
        except BaseException:
            self.close()
            raise
        self._left -= isinstance(event, Finished)
        return index, event

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(self._ask)
        self._events.put_nowait((0, ClientGone()))
