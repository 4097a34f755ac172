"""The bounded queue of requests that wait for the decoder, in which clients take turns."""

from collections import OrderedDict, deque
from threading import Condition

from yggdrasil.serving.errors import Fault
from yggdrasil.serving.jobs import Job, QueuedRequest


class RequestQueue:
    """Serves clients round-robin, one answer at a time; each client's requests are first in, first out.

    So a client waits for at most one answer of each other client, however many requests they have queued.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._changed = Condition()
        self._clients: OrderedDict[str, deque[QueuedRequest]] = OrderedDict()  # the next one to be served first
        self._is_closed = False

    def __len__(self) -> int:
        """Requests that wait."""
        with self._changed:
            return self._length

    @property
    def _length(self) -> int:
        return sum(map(len, self._clients.values()))

    def join(self, ask: QueuedRequest, retry_after: float) -> int:
        """Wait at the end; returns how many requests are before this one.

        Raises:
            Fault: the line is full (``retry_after`` seconds are then asked for), or closed.
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
        """Whether nobody waits now, nor comes within so many seconds."""
        with self._changed:
            if not self._clients and not self._is_closed:
                self._changed.wait(seconds)
            return not self._clients and not self._is_closed

    def take(self) -> tuple[QueuedRequest, Job] | None:
        """The next job, as soon as there is one; None once the line is closed and empty.

        A request with more waits again.
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
        """The request waits no longer, if it did."""
        with self._changed:
            asks = self._clients.get(ask.client)
            if asks is not None and ask in asks:
                asks.remove(ask)
                if not asks:
                    del self._clients[ask.client]

    def close(self, *, ends_begun: bool = False) -> None:
        """Take no more; those who waited are told so, but for the rest of what has begun unless that ends too."""
        with self._changed:
            self._is_closed = True
            waiting = [ask for asks in self._clients.values() for ask in asks if ends_begun or not ask.has_begun]
            for ask in waiting:
                self.leave(ask)
            self._changed.notify_all()
        for ask in waiting:
            ask.fail(closing_fault())


def closing_fault() -> Fault:
    return Fault(503, "the server is shutting down; try again when it is back", headers={"Retry-After": "10"})
