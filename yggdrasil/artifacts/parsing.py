"""Strict reading of plain mappings (YAML, JSON) into typed dataclasses."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from yggdrasil.errors import ArtifactError

T = TypeVar("T")

_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Position:
    """Position of a value for messages: ``where`` is the file, ``key`` the dotted key in the file."""

    where: str
    key: str = ""

    def child(self, name: object) -> "_Position":
        return _Position(self.where, f"{self.key}.{name}" if self.key else str(name))

    def item(self, index: int) -> "_Position":
        return _Position(self.where, f"{self.key}[{index}]")

    def refuse(self, expected: str, value: object) -> ArtifactError:
        subject = f"key '{self.key}'" if self.key else "the content"
        return ArtifactError(f"{self.where}: {subject} should be {expected}, but is {_shown_value(value)}.")


def parse_dataclass(cls: type[T], mapping: object, where: str) -> T:
    """Build the dataclass ``cls`` from a plain mapping (YAML or JSON content), strictly.

    Field types may be int, float (an int is converted), str, bool, None, Path, Literal, list, tuple, dict, unions,
    nested dataclasses and Any. Fields with a default may be missing. Of a union, the first matching alternative is
    used.

    Args:
        where: name of the mapping's source in error messages, usually the file.

    Raises:
        ArtifactError: a key is unknown or missing, a value has a wrong type, or ``cls`` raises ValueError; the message
            has ``where``, the dotted key and close matches.
        TypeError: ``cls`` is not a dataclass, or has another field type.
    """
    return cast("T", _parse_fields(cls, mapping, _Position(where)))


def close_match(word: str, candidates: Collection[str]) -> str:
    """Return `` (did you mean 'x'?)`` with the candidate most like ``word``, or "" without one."""
    matches = difflib.get_close_matches(word, list(candidates), n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def _parse_fields(cls: Any, mapping: object, position: _Position) -> object:
    if not (dataclasses.is_dataclass(cls) and isinstance(cls, type)):
        raise TypeError(f"parse_dataclass needs a dataclass, got {cls!r}")
    if not isinstance(mapping, Mapping):
        raise position.refuse("a mapping", mapping)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    _check_keys(fields, mapping, position)
    hints = typing.get_type_hints(cls)
    values = {name: _convert(hints[name], mapping[name], position.child(name)) for name in fields if name in mapping}
    try:
        return cls(**values)
    except ValueError as error:
        raise ArtifactError(f"{position.where}: {_inside(position)}{error}") from error


def _check_keys(
    fields: "Mapping[str, dataclasses.Field[Any]]", mapping: Mapping[object, object], position: _Position
) -> None:
    for key in mapping:
        if key not in fields:
            # A misspelt key is most likely one of the missing keys.
            absent = [name for name in fields if name not in mapping]
            hint = close_match(str(key), absent) or close_match(str(key), fields)
            raise ArtifactError(
                f"{position.where}: unknown key '{position.child(key).key}'{hint}; remove or rename it."
            )
    for name, field in fields.items():
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_required and name not in mapping:
            raise ArtifactError(
                f"{position.where}: key '{position.child(name).key}' is missing; add it or create the file again."
            )


def _convert(hint: Any, value: object, position: _Position) -> object:
    if hint is Any or hint is object:
        return value
    origin = typing.get_origin(hint) or hint
    if origin in _CONTAINERS:
        return _CONTAINERS[origin](typing.get_args(hint), value, position)
    if dataclasses.is_dataclass(origin):
        return _parse_fields(origin, value, position)
    return _convert_scalar(hint, value, position)


def _convert_scalar(hint: Any, value: object, position: _Position) -> object:
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise position.refuse("a number", value) from error
    if hint not in (int, float, str, bool, type(None), Path):
        raise TypeError(f"parse_dataclass cannot read the field type {hint!r} of '{position.key}'")
    if type(value) is not hint:
        raise position.refuse(_WORDS[hint], value)
    return value


def _convert_list(args: tuple[Any, ...], value: object, position: _Position) -> list[object]:
    if not isinstance(value, list | tuple):
        raise position.refuse("a list", value)
    hint = args[0] if args else Any
    return [_convert(hint, entry, position.item(index)) for index, entry in enumerate(value)]


def _convert_tuple(args: tuple[Any, ...], value: object, position: _Position) -> tuple[object, ...]:
    if not args or (len(args) == 2 and args[1] is Ellipsis):
        return tuple(_convert_list(args[:1], value, position))
    if not isinstance(value, list | tuple) or len(value) != len(args):
        raise position.refuse(f"a list of {len(args)}", value)
    pairs = enumerate(zip(args, value, strict=True))
    return tuple(_convert(hint, entry, position.item(index)) for index, (hint, entry) in pairs)


def _convert_dict(args: tuple[Any, ...], value: object, position: _Position) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise position.refuse("a mapping", value)
    key_hint, value_hint = args or (Any, Any)
    return {
        _convert(key_hint, key, _Position(position.where, f"{position.key} (the name {key!r})")): _convert(
            value_hint, entry, position.child(key)
        )
        for key, entry in value.items()
    }


def _convert_literal(args: tuple[Any, ...], value: object, position: _Position) -> object:
    # The type is compared too: 1 == True == 1.0 in Python.
    if any(type(value) is type(choice) and value == choice for choice in args):
        return value
    choices = " or ".join(repr(choice) for choice in args)
    hint = close_match(value, [str(choice) for choice in args]) if isinstance(value, str) else ""
    raise position.refuse(f"{choices}{hint}", value)


def _convert_union(args: tuple[Any, ...], value: object, position: _Position) -> object:
    # An exact type takes precedence over a conversion, so that ``float | int`` does not convert an int.
    if type(value) in args and type(value) in _WORDS:
        return value
    choices = [hint for hint in args if hint is not type(None)]
    if len(choices) == 1:
        return _convert(choices[0], value, position)
    for hint in choices:
        try:
            return _convert(hint, value, position)
        except ArtifactError:
            continue
    raise position.refuse(" or ".join(_words(hint) for hint in args), value)


_CONTAINERS: dict[object, Callable[[tuple[Any, ...], object, _Position], object]] = {
    list: _convert_list,
    tuple: _convert_tuple,
    dict: _convert_dict,
    Literal: _convert_literal,
    typing.Union: _convert_union,
    types.UnionType: _convert_union,
}


def _words(hint: object) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    return _WORDS.get(typing.get_origin(hint) or hint, getattr(hint, "__name__", str(hint)))


def _inside(position: _Position) -> str:
    return f"key '{position.key}': " if position.key else ""


def _shown_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(value)
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{short} ({_WORDS.get(type(value), type(value).__name__)})"
