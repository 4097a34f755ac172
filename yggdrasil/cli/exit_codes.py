"""Runs a command, maps errors to exit codes, and prints one sentence for an error that the user can correct."""

import contextlib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TextIO

import typer

from yggdrasil.cli.streams import close_output, open_streams
from yggdrasil.errors import Interrupted, Terminated, YggdrasilError, first_line

# Some versions of typer bundle click: these are the ClickException and UsageError of the click that it uses.
_USAGE_FAULT, _COMMAND_FAULT = typer.BadParameter.__mro__[1:3]
_PACKAGE = Path(__file__).parents[1]
_MEMORY_SIGNS = ("can't allocate memory", "out of memory", "not enough memory", "Cannot allocate memory")
_TERMINATED = 128 + signal.SIGTERM  # as a shell reports it
_INTERRUPTED = (
    "interrupted; what was compiled or prepared so far is kept for the next start, and nothing half-written is left"
)


class Ending(NamedTuple):
    """How a command ends: the sentence for standard error (None: nothing is printed) and the exit code."""

    sentence: str | None
    code: int


def run_guarded(load: Callable[[], typer.Typer], name: str) -> NoReturn:
    """Run a typer program, turn its errors into exit codes, and exit.

    Errors that the user can correct print one sentence and exit with 2, an interruption with 130, SIGTERM with 143, a
    closed output pipe with 1. Any other exception is a bug and keeps its traceback.

    Args:
        load: imports and returns the program.
        name: the program's name, which is printed before error messages.
    """
    try:
        signal.signal(signal.SIGTERM, _terminate)
        open_streams()
        _check_arguments(sys.argv[1:])
        _check_folder()
        with _warnings_as_sentences(name):
            code = _invoke(load(), name)
        sys.stdout.flush()
        raise SystemExit(code)
    except (Exception, KeyboardInterrupt) as error:
        ending = ending_of(error)
        if ending is None:
            raise
        _end(name, ending)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # the shutdown needs no cleanup
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _warnings_as_sentences(name: str) -> Iterator[None]:
    """Print warnings of this package as one sentence, without their source line."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category is UserWarning and Path(filename).is_relative_to(_PACKAGE):
                print(f"{name}: {message}", file=sys.stderr, flush=True)
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise Terminated


def ending_of(error: BaseException) -> Ending | None:
    """Return the sentence and exit code with which a command ends after ``error``; None for a bug."""
    if isinstance(error, YggdrasilError):
        is_terminated = isinstance(error, Interrupted) and _was_terminated(error)
        return Ending(" ".join(str(error).splitlines()), _TERMINATED if is_terminated else error.exit_code)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Ending(_INTERRUPTED, _TERMINATED if _was_terminated(error) else Interrupted.exit_code)
    if isinstance(error, BrokenPipeError):
        return Ending(None, 1)
    if isinstance(error, _COMMAND_FAULT):
        return Ending(_usage_sentence(error), 2)
    if isinstance(error, OSError):
        return Ending(_os_sentence(error), 2)
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _MEMORY_SIGNS)
    ):
        return Ending("out of memory; use a smaller model, a plan with a shorter --max-length, or free some", 2)
    return None


def _was_terminated(error: BaseException | None) -> bool:
    """Return whether ``error`` was raised by SIGTERM or while handling it."""
    while error is not None and not isinstance(error, Terminated):
        error = error.__context__
    return error is not None


def _invoke(app: typer.Typer, name: str) -> int:
    """Parse the command line, run its command and return the exit code; click's ``main`` would catch errors."""
    command = typer.main.get_command(app)
    try:
        with command.make_context(name, sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return int(ended.exit_code)
    return 0


def _usage_sentence(error: BaseException) -> str:
    text = str(getattr(error, "format_message", lambda: error)()).strip()
    context = getattr(error, "ctx", None)
    if context is None or type(error).__name__ == "NoArgsIsHelpError":
        return text
    one_line = " ".join(text.split()).rstrip(".")
    return f"{one_line}; see `{context.command_path} --help`"


def _os_sentence(error: OSError) -> str:
    reason = error.strerror or first_line(error)
    # A copy that fills the disk names its source first.
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename2 is not None
    place = error.filename2 if is_full else error.filename
    if place is not None:
        name = os.fsdecode(place) if isinstance(place, str | bytes) else place
        return f"cannot use {name} ({reason}); check the path, its permissions and free space"
    return f"{reason}; check the system's limits, permissions and free space"


def _end(name: str, ending: Ending) -> NoReturn:
    """Print the ending's sentence and exit; output that cannot be written is dropped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second Ctrl-C
    close_output()
    if ending.sentence:
        with contextlib.suppress(OSError, ValueError):
            start = "\n" if ending.code == Interrupted.exit_code else ""  # after the ^C that a terminal shows
            print(f"{start}{name}: {ending.sentence}", file=sys.stderr, flush=True)
    raise SystemExit(ending.code) from None


def _check_folder() -> None:
    """Raise YggdrasilError if the working directory is gone, so that relative paths would fail."""
    try:
        os.getcwd()  # noqa: PTH109  (before pathlib is imported)
    except OSError as error:
        raise YggdrasilError(f"the working directory is gone ({error.strerror}); change to one that is there") from None


def _check_arguments(arguments: list[str]) -> None:
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="backslashreplace").decode()
            raise YggdrasilError(
                f"argument {number}, {shown!r}, is not valid UTF-8 text; write or name it so"
            ) from None
