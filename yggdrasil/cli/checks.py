"""Callbacks that validate options while the command line is parsed, before any work.

A callback returns its value unchanged, or raises a YggdrasilError that names the option.
"""

import math
from pathlib import Path
from typing import TypeVar, get_args

import typer

from yggdrasil.artifacts import check_writable, validate_name
from yggdrasil.checkpoints.formats.names import AUTO, K_FORMATS, Weights
from yggdrasil.errors import ArtifactError, YggdrasilError

_Paths = TypeVar("_Paths", Path, list[Path], None)
_LARGEST = 1 << 24  # no width, context or budget is larger


def parse_widths(text: str) -> tuple[int, ...]:
    """Return the integers of a list such as "1,2,4,8".

    Raises:
        YggdrasilError: ``text`` is not a list of integers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise YggdrasilError(f"{text!r} is not a list of numbers such as 1,2,4,8") from None


def widths(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """Return ``text`` if it is None or a list of integers of at least 1, such as "1,2,4,8".

    Raises:
        YggdrasilError: ``text`` is not such a list, or an integer exceeds 2^24.
    """
    if text is None:
        return None
    try:
        numbers = parse_widths(text)
    except YggdrasilError as error:
        raise YggdrasilError(f"{_typed(parameter)}: {error}") from None
    wrong = [number for number in numbers if not 1 <= number <= _LARGEST]
    if wrong:
        raise YggdrasilError(f"{_typed(parameter)} {text}: {wrong[0]} is not between 1 and {_LARGEST}")
    return text


def drafter(parameter: typer.CallbackParam, value: str) -> str:
    """Return ``value`` if it is "plan", "ngram", "module:Class", a shipped head or an existing path.

    Raises:
        YggdrasilError: ``value`` is none of these.
    """
    from yggdrasil.artifacts.homes import expanded
    from yggdrasil.drafters.registry import NGRAM, is_own
    from yggdrasil.drafters.shipped_assets import resolve_shipped_head

    is_there = value and expanded(resolve_shipped_head(value)).exists()
    if value not in ("plan", NGRAM) and not is_own(value) and not is_there:
        raise YggdrasilError(
            f"{_typed(parameter)} {value} is none of plan, ngram, module:Class (a class of your own) and the folder of "
            "a head"
        )
    return value


def rule(parameter: typer.CallbackParam, value: str) -> str:
    """Return ``value`` if it names an acceptance rule or has the form "module:Class"; else raise YggdrasilError."""
    from yggdrasil.acceptance.speculation import RuleName
    from yggdrasil.own_class import is_own_class

    if value not in get_args(RuleName) and not is_own_class(value):
        names = ", ".join(get_args(RuleName))
        raise YggdrasilError(f"{_typed(parameter)} {value} is none of {names} and module:Class, a class of your own")
    return value


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """Return ``value`` if it is None or a finite number of at least 0; else raise YggdrasilError."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise YggdrasilError(f"{_typed(parameter)} is {value}; give a finite number from 0 on")
    return value


def name(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Return ``value`` if it is None or a valid name of a plan, which need not exist; else raise YggdrasilError."""
    try:
        return value if value is None else validate_name(value)
    except ArtifactError as error:
        raise YggdrasilError(f"{_typed(parameter)}: {error}") from None


def weights(parameter: typer.CallbackParam, text: str) -> str:
    """Return ``text`` if it is a weight format or "auto".

    Raises:
        YggdrasilError: ``text`` is neither, or is a K format and ggml is not installed.
    """
    known = (AUTO, *get_args(Weights))
    if text not in known:
        raise YggdrasilError(f"{_typed(parameter)} {text} is none of {', '.join(known)}")
    if text in K_FORMATS:
        from yggdrasil.checkpoints.formats.ggml import has_ggml

        if not has_ggml():
            raise YggdrasilError(
                f"{_typed(parameter)} {text}: K formats need ggml, which is not installed; pip install "
                "llama-cpp-python, or make a file with llama.cpp's llama-quantize and give that as the model"
            )
    return text


def input_file(parameter: typer.CallbackParam, given: _Paths) -> _Paths:
    """Return ``given``, one path, a list of paths or None, if all its files can be read.

    Raises:
        YggdrasilError: a file is missing, a folder or not readable.
    """
    paths: list[Path] = [given] if isinstance(given, Path) else given or []
    for path in paths:
        try:
            if path.is_dir():
                raise YggdrasilError(f"{_typed(parameter)} {path} is a folder; give a file")
            path.open("rb").close()
        except OSError as error:
            raise YggdrasilError(
                f"{_typed(parameter)} {path} cannot be read ({error.strerror}); check the path"
            ) from None
    return given


def output_file(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return ``path`` if it is None or a file that can be written; else raise YggdrasilError. Nothing is written."""
    _check_output(parameter, path, is_folder=False)
    return path


def output_folder(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return ``path`` if it is None or a folder that can be written to or created; else raise YggdrasilError."""
    _check_output(parameter, path, is_folder=True)
    return path


def _check_output(parameter: typer.CallbackParam, path: Path | None, *, is_folder: bool) -> None:
    if path is None:
        return
    try:
        check_writable(path, is_folder=is_folder)
    except ArtifactError as error:
        raise YggdrasilError(f"{_typed(parameter)}: {error}") from None


def _typed(parameter: typer.CallbackParam) -> str:
    """Return the option's name as the user types it."""
    return str(parameter.opts[0])
