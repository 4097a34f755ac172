"""Faults that the user can mend. Anything else is a bug and keeps its traceback."""

from typing import ClassVar


class YggdrasilError(Exception):
    """A fault the user can mend, said in one clear sentence.

    The message names the file or the option and the way out. The CLI prints it without a traceback and leaves with
    ``exit_code``.
    """

    exit_code: ClassVar[int] = 2


class ArtifactError(YggdrasilError):
    """A profile, predictor, plan or checkpoint on disk is missing, damaged, or does not fit what it is used with."""
