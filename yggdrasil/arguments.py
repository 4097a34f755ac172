"""Checks of what callers give: every function returns the value as it is meant, or says in one sentence what is wrong.

A value of another kind is an ``ArgumentTypeError`` (a ``TypeError`` too), one out of range an ``ArgumentValueError`` (a
``ValueError`` too). Numbers may be numpy's; truth values are no numbers.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf, isfinite
from numbers import Real
from typing import Any

from yggdrasil.errors import ArgumentTypeError, ArgumentValueError


def check_integer(name: str, value: Any, least: int, most: int | None = None, *, rule: str | None = None) -> int:
    """A whole number of at least ``least`` and at most ``most``; ``rule`` says so in other words."""
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
    """A finite number from ``least`` (itself excluded where ``is_open``) to ``most``."""
    allowed = rule or f"between {least:g} and {most:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a number, {allowed}")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all that floats hold
        number = inf
    if not isfinite(number) or not least <= number <= most or (is_open and number == least):
        raise ArgumentValueError(f"{name} is {value!r}; it must be {allowed}")
    return number


def keep_plain_numbers(checked: Any) -> None:
    """Have a frozen dataclass, whose fields were checked, hold Python's own numbers: others' code takes no others."""
    for each in fields(checked):
        value = getattr(checked, each.name)
        number = as_integer(value)
        if number is not None:
            object.__setattr__(checked, each.name, number)
        elif isinstance(value, Real) and not isinstance(value, bool):
            object.__setattr__(checked, each.name, float(value))


def check_name(name: str, value: Any, names: Sequence[str]) -> str:
    """One of ``names``."""
    if not isinstance(value, str) or value not in names:
        raise ArgumentValueError(f"{name} is {value!r}; it must be one of {', '.join(names)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """True or False and nothing that may pass for one."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} is {value!r}; it must be True or False")
    return value


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Texts that are not empty; a single text is one item, None is none."""
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
    """Unicode text: without half of a surrogate pair, which no tokenizer takes."""
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{name} is {text!r}; it must be a text")
    place = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if place is not None:
        raise ArgumentValueError(
            f"{name} has half of a surrogate pair ({text[place]!a}) as character {place + 1}; give Unicode text"
        )
    return text


def check_tokens(name: str, value: Any) -> list[int]:
    """Token numbers, from any sequence of whole numbers."""
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
    """The whole number that ``value`` is, None where it is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
