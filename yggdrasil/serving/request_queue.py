"""Bounded queue of requests that wait for the decoder, round-robin over clients."""

from collections import OrderedDict, deque
from threading import Condition

from yggdrasil.serving.errors import Fault
from yggdrasil.serving.jobs import Job, QueuedRequest


class RequestQueue:
    """Thread-safe queue, round-robin over clients, one answer at a time; within a client first in, first out.

    Before each of its answers, a client waits for at most one answer of every other client.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._changed = Condition()
        self._clients: OrderedDict[str, deque[QueuedRequest]] = OrderedDict()  # in the order in which they are served
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        with self._changed:
            return self._length

    @property
    def _length(self) -> int:
        return sum(map(len, self._clients.values()))

    def join(self, ask: QueuedRequest, retry_after: float) -> int:
        """Append a request to its client's queue and return the number of requests that were waiting.

        Args:
            retry_after: seconds in the Retry-After header of the error reply if the queue is full.

        Raises:
            Fault: the queue is full (status 429) or closed (503).
        """
        with self._changed:
            if self._is_closed:
                raise closing_fault()
            position = self._length
            if position >= self.capacity:
                raise Fault(
                    429, f"{position} requests are waiting, and no more may; try again later",
                    code="queue_full", headers={"Retry-After": str(max(1, round(retry_after)))},
                )  # fmt: skip
            self._clients.setdefault(ask.client, deque()).append(ask)
            self._changed.notify()
            return position

    def is_quiet(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a request, and return True if the queue is open and still empty."""
        with self._changed:
            if not self._clients and not self._is_closed:
                self._changed.wait(seconds)
            return not self._clients and not self._is_closed

    def take(self) -> tuple[QueuedRequest, Job] | None:
        """Wait for the next answer to decode, remove it, and return its request and its job.

        None is returned once the queue is closed and empty. A client that has more answers moves to the end of the
        round-robin.
        """
        with self._changed:
            while not self._clients and not self._is_closed:
                self._changed.wait()
            if not self._clients:
                return None
            client, asks = self._clients.popitem(last=False)
            ask = asks[0]
            job = ask.jobs.pop(0)
            ask.has_begun = True
            if not ask.jobs:
                asks.popleft()
            if asks:
                self._clients[client] = asks
            return ask, job

    def leave(self, ask: QueuedRequest) -> None:
        """Remove a request from the queue if it is still waiting."""
        with self._changed:
            asks = self._clients.get(ask.client)
            if asks is not None and ask in asks:
                asks.remove(ask)
                if not asks:
                    del self._clients[ask.client]

    def close(self, *, ends_begun: bool = False) -> None:
        """Reject new requests, and fail waiting requests of which no answer was taken (status 503).

        Args:
            ends_begun: also fail the remaining answers of requests of which an answer was taken.
        """
        with self._changed:
            self._is_closed = True
            waiting = [ask for asks in self._clients.values() for ask in asks if ends_begun or not ask.has_begun]
            for ask in waiting:
                self.leave(ask)
            self._changed.notify_all()
        for ask in waiting:
            ask.fail(closing_fault())


def closing_fault() -> Fault:
    """Return, not raise, the error reply (503) for requests while the server shuts down."""
    return Fault(503, "the server is shutting down; try again when it is back", headers={"Retry-After": "10"})
