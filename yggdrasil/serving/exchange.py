"""One HTTP request's exchange with the worker: queue, await and, if the client disconnects, cancel its answers."""

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
    """The token ids of a prompt, with the options of its answer."""

    prompt: Sequence[int]
    options: RequestOptions
    shows_trees: bool = False  # as in ``Job``
    scores: int | None = None  # as in ``Job``


class Exchange:
    """The queued jobs of one HTTP request, with an iterator over their events.

    The creator must call ``close``. ``events`` and ``results`` do so at their end, and ``begin`` after an error.
    """

    def __init__(
        self,
        worker: Worker,
        request: Request,
        wanted: Sequence[JobRequest],
        *,
        is_streamed: bool,
        frame: Frame | None = None,
    ) -> None:
        """Queue one job for each entry of ``wanted``, and watch whether the client disconnects.

        Args:
            is_streamed: whether pieces of text are emitted, not only results.
            frame: encodes a text as the bytes to send. If given, the decoder's thread may send text after the first
                piece to the socket itself, without an event. Only for requests with one answer.

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
        """Wait for the first event, so that the reply to a request that fails at once can have an error status.

        Raises:
            Fault: the request failed.
            ClientGone: the client disconnected.
        """
        try:
            _, event = await self._post.first()
            if isinstance(event, Failed):
                raise event.error
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[NumberedEvent]:
        """Yield (answer index, event) until all answers are finished.

        After the first text, an answer's pieces are joined over 0.03 s. Text that the decoder's thread sends to the
        socket itself (see ``frame``) is not yielded.

        Raises:
            Fault: an answer failed; the others are cancelled.
            ClientGone: the client disconnected.
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
        """Let pieces gather until ``GATHER_SECONDS`` have passed or an answer ends.

        If the decoder's thread may write to the socket, let it send text instead, until an answer ends or the socket
        accepts no more.
        """
        if self._outlet is None and self._frame is not None:
            self._outlet, self._frame = SocketWriter.of(self._request, self._frame), None
        if self._outlet is None or not self._outlet.open():
            await self._post.rest(GATHER_SECONDS)
            return
        await self._post.hand_over(self._outlet)
        self._outlet.give_back()

    async def results(self) -> list[Finished]:
        """Wait for all answers and return them in the order of their indices.

        Raises:
            Fault: an answer failed; the others are cancelled.
            ClientGone: the client disconnected.
        """
        found = {number: event async for number, event in self.events() if isinstance(event, Finished)}
        return [found[number] for number in sorted(found)]

    def close(self) -> None:
        """Cancel the answers that have not ended, and stop watching whether the client disconnects.

        The connection stays open: only this object's duplicate of the socket is closed. Repeated calls do nothing.
        """
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
    """Return the HTTP response to a queued request: one JSON object, or a stream of objects.

    Args:
        exchange: the queued answers of the request.
        whole: builds the JSON object of finished answers.
        chunks: yields lists of the objects of a stream; each list is sent as one write.
        framing: wire format of a stream.

    Raises:
        Fault: the request failed before a stream began.
        ClientGone: the client disconnected.
    """
    if not exchange.is_streamed:
        return JSONResponse(whole(await exchange.results()))
    await exchange.begin()
    return EventStream(chunks(exchange), exchange.close, framing)
