"""Makes sure that the three standard streams are open and can encode any character."""

import os
import sys
from typing import Any, TextIO, cast

from yggdrasil.errors import YggdrasilError, first_line


class OutputError(YggdrasilError):
    """Raised if standard output cannot be written, for example on a full disk or a lost terminal."""


class Output:
    """Wraps standard output so that its errors become ``OutputError``; everything else is passed to the stream.

    The system's error has no path, so it could not be distinguished from an error of another file. A BrokenPipeError is
    raised unchanged.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _said(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _said(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_streams() -> None:
    """Open missing standard streams on the null device; standard output escapes characters it cannot encode.

    Otherwise the next opened file would get a closed stream's descriptor, and print would write into it.

    Raises:
        YggdrasilError: standard output is closed.
    """
    is_shown = sys.stdout is not None
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            to_nowhere(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for the process's life
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123 - for the process's life
    if not is_shown:
        raise YggdrasilError("standard output is closed; give it somewhere to go, /dev/null for nowhere")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="strict")  # in the C locale invalid bytes would be accepted
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stdout, Output):
        sys.stdout = cast(TextIO, Output(sys.stdout))


def close_output() -> None:
    """Flush standard output, or drop text that cannot be written, so that the interpreter does not fail at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError, OutputError):
        to_nowhere(1)


def to_nowhere(descriptor: int) -> None:
    """Redirect a file descriptor to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _said(error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):
        return error
    reason = error.strerror or first_line(error)
    return OutputError(f"standard output cannot be written ({reason}); give it somewhere with room")
