"""Faults that the user can mend. Anything else is a bug and keeps its traceback."""

from typing import ClassVar


class YggdrasilError(Exception):
    """A fault the user can mend, said in one clear sentence.

    The message names the file or the option and the way out. The CLI prints it without a traceback and leaves with
    ``exit_code``.
    """

    exit_code: ClassVar[int] = 2


class Interrupted(YggdrasilError):
    """The user ended it (Ctrl-C; by SIGTERM a command's exit code is 143); the sentence says what was kept."""

    exit_code: ClassVar[int] = 130


class Terminated(KeyboardInterrupt):
    """SIGTERM: as Ctrl-C, but nobody is there who could mean only an answer by it."""


class ArgumentValueError(YggdrasilError, ValueError):
    """A value that an argument cannot have."""


class ArgumentTypeError(YggdrasilError, TypeError):
    """A value of a kind that an argument cannot have."""


class ContextFull(YggdrasilError):
    """A prompt has as many tokens as the context holds, or more."""


class ArtifactError(YggdrasilError):
    """A profile, predictor, plan or checkpoint on disk is missing, damaged, or does not fit what it is used with."""


def first_line(error: object) -> str:
    """The first line of what an error says, or its kind where it says nothing: for a sentence that names the cause."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: object, most: int = 200) -> str:
    """All that an error says in one line, cut at ``most`` characters: where the first line is a heading alone."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."
