"""Callbacks of options: what cannot be meant is refused by name while the command line is read, before any work."""

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
    """Numbers from a list such as ``1,2,4,8``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise YggdrasilError(f"{text!r} is not a list of numbers such as 1,2,4,8") from None


def widths(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """A list of whole numbers from 1 on, or nothing."""
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
    """``plan``, ``ngram`` or ``module:Class``."""
    from yggdrasil.drafters.registry import NGRAM, is_own

    if value not in ("plan", NGRAM) and not is_own(value):
        raise YggdrasilError(
            f"{_typed(parameter)} {value} is none of plan, ngram and module:Class, a class of your own"
        )
    return value


def rule(parameter: typer.CallbackParam, value: str) -> str:
    """An acceptance rule's name or ``module:Class``."""
    from yggdrasil.acceptance.speculation import RuleName
    from yggdrasil.own_class import is_own_class

    if value not in get_args(RuleName) and not is_own_class(value):
        names = ", ".join(get_args(RuleName))
        raise YggdrasilError(f"{_typed(parameter)} {value} is none of {names} and module:Class, a class of your own")
    return value


def temperatures(parameter: typer.CallbackParam, text: str) -> str:
    """A list of finite numbers from 0 on."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise YggdrasilError(f"{_typed(parameter)} {text} is not a list of numbers such as 0,1")
    return text


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """A number from 0 on, or nothing."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise YggdrasilError(f"{_typed(parameter)} is {value}; give a finite number from 0 on")
    return value


def name(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Refuse a name that no artefact can have; None passes."""
    try:
        return value if value is None else validate_name(value)
    except ArtifactError as error:
        raise YggdrasilError(f"{_typed(parameter)}: {error}") from None


def weights(parameter: typer.CallbackParam, text: str) -> str:
    """Refuse unknown weight formats, and K formats where the library that rounds to them is missing."""
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
    """Files that can be read."""
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
    """A file that can be written, or nothing."""
    _check_output(parameter, path, is_folder=False)
    return path


def output_folder(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """A folder that can be written into, or nothing."""
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
    """The option as a person types it."""
    return str(parameter.opts[0])
