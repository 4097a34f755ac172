"""One request at a time: whoever comes in between is refused, or waits, before anything is touched."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from yggdrasil.errors import YggdrasilError


class Turns:
    """Turns on one decoder, whichever threads ask for them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: int | None = None  # the thread whose turn it is

    @contextmanager
    def take(self, *, wait: bool) -> Iterator[None]:
        """Hold the turn; ``wait`` for it where it is taken.

        Raises:
            YggdrasilError: it is taken, and waiting was not asked for or would have no end.
        """
        if not self._lock.acquire(blocking=False):
            self._wait(wait=wait)
        self._holder = get_ident()
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()

    def _wait(self, *, wait: bool) -> None:
        if not wait:
            raise YggdrasilError(
                "another request is under way on this decoder, which serves one at a time: finish or drop that one, "
                "or queue with wait=True"
            )
        if self._holder == get_ident():
            raise YggdrasilError("this thread's own request is under way on this decoder; finish or drop it first")
        self._lock.acquire()
