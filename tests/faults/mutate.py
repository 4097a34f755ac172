"""Seeded damage: to the bytes of a file, or to one value of a structured one."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

WRONG_VALUES: tuple[Any, ...] = (
    None, "", [], {}, True, -1, 0, 1, 3.5, 10**9, 10**30, 1e308, math.nan, math.inf, "x", "9" * 5000, "../..", "\ud800",
    "no/such", [None], {"a": 1}, "1", -0.5,
)  # fmt: skip


def damage(path: Path, random: Random) -> str:
    """Damage the file in one way; returns what was done."""
    name = random.choice(list(BYTE_DAMAGE))
    data = path.read_bytes()
    path.write_bytes(BYTE_DAMAGE[name](data, random))
    return name


def replace_file(path: Path, random: Random) -> str:
    """Have something else stand where the file stood; returns what."""
    name = random.choice(list(REPLACEMENTS))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    REPLACEMENTS[name](path)
    return name


def change_value(content: Any, random: Random) -> tuple[Any, str]:
    """A copy of plain ``content`` with one value removed, replaced or doubled, and where."""
    content = copy.deepcopy(content)
    places = list(_places(content, ()))
    where = random.choice(places)
    holder = content
    for key in where[:-1]:
        holder = holder[key]
    kind = random.choice(("remove", "replace", "replace", "replace", "rename"))
    if kind == "replace":
        value = random.choice(WRONG_VALUES)
        old = holder[where[-1]]
        if isinstance(old, int | float) and not isinstance(old, bool) and random.random() < 0.5:
            value = random.choice((-old, old * 1000, old / 3, old + 1, float(old), str(old)))
        holder[where[-1]] = value
        return content, f"{_shown(where)} = {value!r:.40}"
    value = holder.pop(where[-1])
    if kind == "rename" and isinstance(holder, dict):
        holder[f"{where[-1]}x"] = value
    return content, f"{kind} {_shown(where)}"


def change_json(path: Path, random: Random) -> str:
    content, done = change_value(json.loads(path.read_text()), random)
    path.write_text(json.dumps(content))
    return done


def _places(content: Any, where: tuple[Any, ...]) -> Any:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*where, key)
        if not isinstance(value, list) or len(value) < 100:
            yield from _places(value, (*where, key))


def _shown(where: tuple[Any, ...]) -> str:
    return ".".join(map(str, where))


def _at(data: bytes, random: Random) -> int:
    """A place in the file, often near its beginning or end, where headers and trailers are."""
    size = max(len(data), 1)
    return random.choice(
        (random.randrange(size), min(random.randrange(64), size - 1), size - 1 - random.randrange(64) % size)
    )


def _flip(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 8))):
        if changed:
            changed[_at(data, random)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, random: Random) -> bytes:
    start, size = _at(data, random), random.choice((1, 16, 4096))
    return data[:start] + random.randbytes(size) + data[start + size :]


def _zero(data: bytes, random: Random) -> bytes:
    start, size = _at(data, random), random.choice((1, 16, 4096))
    return data[:start] + bytes(min(size, len(data) - start)) + data[start + size :]


def _insert(data: bytes, random: Random) -> bytes:
    start = _at(data, random)
    return data[:start] + random.choice((b"\x00", b"\n", b"\xff\xfe", b"{", random.randbytes(16))) + data[start:]


def _delete(data: bytes, random: Random) -> bytes:
    start = _at(data, random)
    return data[:start] + data[start + random.choice((1, 16, 512)) :]


BYTE_DAMAGE: dict[str, Callable[[bytes, Random], bytes]] = {
    "truncated": lambda data, random: data[: _at(data, random)],
    "half": lambda data, random: data[: len(data) // 2],
    "empty": lambda data, random: b"",
    "flipped": _flip,
    "flipped again": _flip,
    "overwritten": _overwrite,
    "zeroed": _zero,
    "inserted": _insert,
    "deleted": _delete,
    "doubled": lambda data, random: data + data,
    "appended": lambda data, random: data + random.randbytes(random.choice((1, 100))),
    "halves exchanged": lambda data, random: data[len(data) // 2 :] + data[: len(data) // 2],
    "random": lambda data, random: random.randbytes(min(len(data), 5000)),
    "zeros": lambda data, random: bytes(len(data)),
    "other text": lambda data, random: random.choice(
        (b"null", b"[]", b"{}", b"0", b'"text"', b"[" * 100_000, b"a: &a *a")
    ),
    "byte order mark": lambda data, random: b"\xef\xbb\xbf" + data,
    "utf-16": lambda data, random: data.decode("latin-1").encode("utf-16"),
}
REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "/dev/null": lambda path: path.symlink_to(os.devnull),
}
