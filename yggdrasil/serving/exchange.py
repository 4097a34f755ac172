"""The answers of one HTTP request: queued, awaited, and cancelled when the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from yggdrasil.engine.request_options import RequestOptions
from yggdrasil.serving.client_socket import GATHER_SECONDS, Frame, SocketWriter
from yggdrasil.serving.errors import ClientGone
from yggdrasil.serving.jobs import Failed, Finished, Job, Piece, QueuedRequest
from yggdrasil.serving.loop_messages import EventChannel, NumberedEvent
from yggdrasil.serving.streams import CHUNKS, EventStream, Framing
from yggdrasil.serving.worker import Worker


class JobRequest(NamedTuple):
    """A prompt with the options of its continuation."""

    prompt: Sequence[int]
    options: RequestOptions
    shows_trees: bool = False
    scores: int | None = None  # as in ``Job``


class Exchange:
    """Iterates over the events of one request's answers, each with the answer's number. Its creator closes it."""

    def __init__(
        self,
        worker: Worker,
        request: Request,
        wanted: Sequence[JobRequest],
        *,
        is_streamed: bool,
        frame: Frame | None = None,
    ) -> None:
        """Queue the request.

        Args:
            is_streamed: emit pieces; else only results.
            frame: makes bytes of text. With it, text behind the first piece may be sent straight to the socket, without
                an event. Only for requests of one answer.

        Raises:
            Fault: the queue is full or closed.
        """
        self._worker, self._request, self.is_streamed = worker, request, is_streamed
        self._post = EventChannel()
        self._left = len(wanted)
        jobs = [
            Job(each.prompt, each.options, partial(self._post.put, i), is_streamed, each.shows_trees, each.scores)
            for i, each in enumerate(wanted)
        ]
        client = request.client.host if request.client is not None else ""
        self._ask = QueuedRequest(client, jobs)
        worker.submit(self._ask)
        self._frame = frame
        self._outlet: SocketWriter | None = None
        self._watch = asyncio.ensure_future(self._until_gone())

    async def begin(self) -> None:
        """Wait for the first event, before which nothing should be answered.

        Raises:
            Fault: the request failed.
            ClientGone: the client did not wait.
        """
        try:
            _, event = await self._post.first()
            if isinstance(event, Failed):
                raise event.error
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[NumberedEvent]:
        """All events, each with the number of its answer; pieces of text not more often than anybody reads.

        Raises:
            Fault: an answer failed; the others are given up.
            ClientGone: the client did not wait.
        """
        has_text = False
        try:
            while self._left:
                if has_text:
                    await self._gather()
                for number, event in await self._post.take():
                    if isinstance(event, Failed):
                        raise event.error
                    self._left -= isinstance(event, Finished)
                    has_text |= isinstance(event, Piece) and bool(event.text)
                    yield number, event
        finally:
            self.close()

    async def _gather(self) -> None:
        """Let text gather, or be sent by the decoder's thread, as long as there is no more than text."""
        if self._outlet is None and self._frame is not None:
            self._outlet, self._frame = SocketWriter.of(self._request, self._frame), None
        if self._outlet is None or not self._outlet.open():
            await self._post.rest(GATHER_SECONDS)
            return
        await self._post.hand_over(self._outlet)
        self._outlet.give_back()

    async def results(self) -> list[Finished]:
        """All answers.

        Raises:
            Fault, ClientGone: as ``events``.
        """
        found = {number: event async for number, event in self.events() if isinstance(event, Finished)}
        return [found[number] for number in sorted(found)]

    def close(self) -> None:
        """Give up what is not answered yet."""
        self._watch.cancel()
        self._worker.cancel(self._ask)
        if self._outlet is not None:
            self._outlet.close()

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(self._ask)
        self._post.put(0, Failed(ClientGone()))


async def answer(
    exchange: Exchange,
    whole: Callable[[list[Finished]], dict[str, Any]],
    chunks: Callable[[Exchange], AsyncIterator[list[dict[str, Any]]]],
    framing: Framing = CHUNKS,
) -> Response:
    """The reply to a request: what ``whole`` makes of all results, or for a stream what ``chunks`` yields.

    Raises:
        Fault: the request failed before a stream began.
        ClientGone: the client did not wait.
    """
    if not exchange.is_streamed:
        return JSONResponse(whole(await exchange.results()))
    await exchange.begin()
    return EventStream(chunks(exchange), exchange.close, framing)
