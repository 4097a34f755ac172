"""Checks that no step is built while something is timed."""

from collections.abc import Iterator
from contextlib import contextmanager

from yggdrasil.compiler.compiled import BuildClock
from yggdrasil.errors import YggdrasilError


class SomethingBuiltError(YggdrasilError):
    """A step was compiled or loaded while something was timed."""


@contextmanager
def nothing_built(what: str) -> Iterator[None]:
    """Check that no step is compiled or loaded within the block, which times ``what``.

    Raises:
        SomethingBuiltError: a step was compiled or loaded in the block, so the time is invalid.
    """
    built = BuildClock.ns
    yield
    if BuildClock.ns != built:
        raise SomethingBuiltError(
            f"a step was compiled or loaded while {what} was timed, so the comparison is not reported; run the same "
            "command again"
        )
