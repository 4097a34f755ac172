"""A value that is computed once, by a thread ahead of its use or by the first caller that needs it."""

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A callable that returns the result of ``make()``, which its first call runs; other threads' calls wait.

    If ``make`` raises, the call raises the same exception, and the next call runs ``make`` again.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: T
        self._lock = Lock()

    def __call__(self) -> T:
        with self._lock:
            if self._make is not None:
                self._made = self._make()
                self._make = None  # frees the objects that ``make`` refers to
            return self._made
