"""Validation of arguments: each ``check_`` function returns the value, converted to plain Python, or raises.

A value of a wrong type raises ``ArgumentTypeError`` (also a ``TypeError``), a value out of range ``ArgumentValueError``
(also a ``ValueError``). numpy numbers are accepted as numbers, bool is not.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from math import inf, isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from yggdrasil.errors import ArgumentTypeError, ArgumentValueError, YggdrasilError


def check_integer(name: str, value: Any, least: int, most: int | None = None, *, rule: str | None = None) -> int:
    """Return ``value`` as an int from ``least`` to ``most``, both included (``most`` None: unbounded).

    Args:
        name: the argument's name, for error messages.
        rule: replaces the range in the error message.

    Raises:
        ArgumentTypeError, ArgumentValueError: ``value`` is no integer, or out of range.
    """
    allowed = rule or (f"at least {least}" if most is None else f"between {least} and {most}")
    number = as_integer(value)
    if number is None:
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a whole number, {allowed}")
    if number < least or (most is not None and number > most):
        raise ArgumentValueError(f"{name} is {value!r}; it must be {allowed}")
    return number


def check_number(
    name: str, value: Any, least: float, most: float, *, rule: str | None = None, is_open: bool = False
) -> float:
    """Return ``value`` as a finite float from ``least`` (excluded if ``is_open``) to ``most`` (included).

    Args:
        name: the argument's name, for error messages.
        rule: replaces the range in the error message.

    Raises:
        ArgumentTypeError, ArgumentValueError: ``value`` is no number, or out of range.
    """
    allowed = rule or f"between {least:g} and {most:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a number, {allowed}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of float
        number = inf
    if not isfinite(number) or not least <= number <= most or (is_open and number == least):
        raise ArgumentValueError(f"{name} is {value!r}; it must be {allowed}")
    return number


def keep_plain_numbers(checked: Any) -> None:
    """Convert NumPy numbers in a frozen dataclass's fields to int and float, in place, as other libraries reject them.

    Bools, and numbers inside containers, stay as they are.
    """
    for each in fields(checked):
        value = getattr(checked, each.name)
        number = as_integer(value)
        if number is not None:
            object.__setattr__(checked, each.name, number)
        elif isinstance(value, Real) and not isinstance(value, bool):
            object.__setattr__(checked, each.name, float(value))


def check_name(name: str, value: Any, names: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``names``; else raise ArgumentValueError on the argument ``name``."""
    if not isinstance(value, str) or value not in names:
        raise ArgumentValueError(f"{name} is {value!r}; it must be one of {', '.join(names)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool; else (also for 0, 1 and NumPy's bool) raise ArgumentTypeError on ``name``."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} is {value!r}; it must be True or False")
    return value


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a string or a sequence of strings as a tuple of non-empty strings; None gives an empty tuple.

    Args:
        name: the argument's name, for error messages.

    Raises:
        ArgumentTypeError, ArgumentValueError: an item is no string, is empty, or has an unpaired surrogate.
    """
    if value is None:
        return ()
    if not isinstance(value, str) and (isinstance(value, bytes | Mapping) or not isinstance(value, Sequence)):
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a text or a list of texts")
    items = (value,) if isinstance(value, str) else tuple(value)
    for item in items:
        if not isinstance(item, str):
            raise ArgumentTypeError(f"{name} holds {item!r}, which is no text")
        if not item:
            raise ArgumentValueError(f"{name} holds an empty text; leave it out")
        check_text(name, item)
    return items


def check_text(name: str, text: Any) -> str:
    """Return ``text`` if it is a string without unpaired surrogates, which tokenizers reject.

    Args:
        name: the argument's name, for error messages.

    Raises:
        ArgumentTypeError, ArgumentValueError: ``text`` is no string, or has an unpaired surrogate.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{name} is {text!r}; it must be a text")
    place = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if place is not None:
        raise ArgumentValueError(
            f"{name} has half of a surrogate pair ({text[place]!a}) as character {place + 1}; give Unicode text"
        )
    return text


def check_tokens(name: str, value: Any) -> list[int]:
    """Return token ids, given as any iterable of integers, as a list of int.

    Args:
        name: the argument's name, for error messages.

    Raises:
        ArgumentTypeError: ``value`` is a string, a mapping or no iterable, or an item is no integer.
    """
    if isinstance(value, str | bytes | Mapping):
        raise ArgumentTypeError(f"{name} is a {type(value).__name__}; it must be a list of whole numbers")
    try:
        items = list(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a list of whole numbers") from None
    tokens = []
    for item in items:
        number = as_integer(item)
        if number is None:
            raise ArgumentTypeError(f"{name} holds {item!r}, which is no whole number")
        tokens.append(number)
    return tokens


def as_integer(value: Any) -> int | None:
    """Return ``value`` as an int; None if it is a bool or not an integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_package(package: str, purpose: str, extra: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: the name to import.
        purpose: the feature that needs the package, for the message, such as "a constraint".
        extra: the group of our optional dependencies that installs it, such as "structured".

    Raises:
        YggdrasilError: the package is not installed; the message has the command that installs it.
    """
    if find_spec(package) is None:
        root = Path(__file__).parent.parent
        source = f"-e '{root}[{extra}]'" if (root / "pyproject.toml").is_file() else f"'yggdrasil-decode[{extra}]'"
        raise YggdrasilError(f"{purpose} needs the package {package}; install it with `pip install {source}`")
