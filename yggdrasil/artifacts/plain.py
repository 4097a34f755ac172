"""Convert values to plain containers, write them as YAML, and parse YAML and JSON from untrusted files safely."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from yggdrasil.errors import first_line

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is 10x faster, if PyYAML was built with it
_MOST_DEPTH = 100


class _ReadableDumper(yaml.SafeDumper):
    """A SafeDumper that writes lists of plain values on one line, so that tables are readable."""

    def represent_sequence(
        self, tag: str, sequence: Iterable[Any], flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        items = list(sequence)
        is_flat = not any(isinstance(item, list | dict) for item in items)
        return super().represent_sequence(tag, items, flow_style=is_flat if flow_style is None else flow_style)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # NOTE: except in double quotes, PyYAML leaves U+0085 and similar unescaped, which readers take for line ends.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_ReadableDumper.add_representer(str, _ReadableDumper.represent_text)


def yaml_text(content: Mapping[str, object]) -> str:
    """Return ``content`` as YAML text, with keys in order, that ``yaml.safe_load`` reads back exactly.

    Args:
        content: dicts with str or int keys, lists, str, int, float, bool and None, as ``to_plain`` returns them.
    """
    return yaml.dump(
        content, Dumper=_ReadableDumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120
    )


def parse_yaml(text: bytes | str) -> Any:
    """Parse YAML and return its content: dicts, lists, str, int, float, bool, dates and None.

    Raises:
        ValueError: the text is not valid YAML, has aliases or Python's own tags, or is nested more than 100 deep.
    """
    try:
        _refuse_unusual(text)
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"not YAML that can be read: {first_line(error)}") from error


def _refuse_unusual(text: bytes | str) -> None:
    """Raise YAMLError for aliases, which can expand to more than memory holds, and for nesting that is too deep."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise yaml.YAMLError("it is nested too deep")


def parse_json(text: bytes | str) -> Any:
    """Parse JSON and return its content.

    Raises:
        ValueError: the text is not valid JSON or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def to_plain(value: object) -> Any:
    """Convert ``value`` for YAML or JSON: to dicts, lists, str, int, float, bool and None, at every level.

    Dataclasses and mappings become dicts; lists and tuples become lists; paths become str; NumPy scalars become Python
    numbers.

    Raises:
        TypeError: a value has no plain form, or a mapping has a key that is neither str nor int.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_plain_key(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return to_plain(value.item())  # type: ignore[attr-defined]
    raise TypeError(f"an artefact cannot hold {value!r} of type {type(value).__name__}")


def _plain_key(key: object) -> str | int:
    plain = to_plain(key)
    if type(plain) not in (str, int):
        raise TypeError(f"an artefact's mapping cannot have the key {key!r} of type {type(key).__name__}")
    assert isinstance(plain, str | int)
    return plain
