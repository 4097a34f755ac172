"""Errors that the user can correct. Any other exception is a bug and keeps its traceback."""

from collections.abc import Sequence
from typing import ClassVar


class YggdrasilError(Exception):
    """An error that the user can correct, described in one sentence.

    The message names the file or option at fault and how to correct it. The CLI prints it without a traceback and
    exits with ``exit_code``.
    """

    exit_code: ClassVar[int] = 2


class Interrupted(YggdrasilError):
    """A user's interruption of a command; the message states what was saved.

    Ctrl-C exits with ``exit_code``. After SIGTERM the CLI exits with 143 instead.
    """

    exit_code: ClassVar[int] = 130


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which ends the whole process, while Ctrl-C in a chat ends only the current answer."""


class ArgumentValueError(YggdrasilError, ValueError):
    """An argument has a value out of range."""


class ArgumentTypeError(YggdrasilError, TypeError):
    """An argument has a wrong type."""


class ContextFull(YggdrasilError):
    """A prompt is too long: it leaves no room in the context for a generated token."""


class ArtifactError(YggdrasilError):
    """A profile, predictor, plan or checkpoint on disk is missing, damaged or incompatible."""


def first_line(error: object) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: object) -> str:
    """Return an error's whole message on one line, cut to 200 characters; its class name if it is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names and the number of the others, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
