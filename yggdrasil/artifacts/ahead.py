"""A value that is made once: by a thread ahead of its use, or else by whoever needs it."""

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The value that ``make`` returns. A call waits for another thread that is making it, and returns its value."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: T
        self._lock = Lock()

    def __call__(self) -> T:
        with self._lock:
            if self._make is not None:
                self._made = self._make()
                self._make = None  # what it refers to is needed no more
            return self._made
