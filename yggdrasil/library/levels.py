"""Levels of instruction sets: the native library is compiled once for each, and chosen by the processor's features.

Uses only the standard library: ``setup.py`` imports it before anything is installed.
"""

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

VARIABLE = "YGGDRASIL_CPU_LEVEL"  # environment variable that selects a level by name
NONE = "none"  # value that selects the portable operators
_X86 = ("x86_64", "AMD64")


class Level(NamedTuple):
    """A set of instruction sets, such as "avx512", that a compiled native library may use."""

    name: str
    flags: tuple[str, ...]  # options of GCC and Clang
    features: tuple[str, ...]  # required processor flags, as in /proc/cpuinfo


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
PLAIN = Level("plain", (), ())  # the compiler's default for this architecture
_X86_LEVELS = (
    PLAIN,
    Level("avx2", ("-march=x86-64-v3",), _AVX2),
    Level("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), (*_AVX2, "avx_vnni")),
    Level("avx512", ("-march=x86-64-v4",), _AVX512),
    Level("avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
    Level("avx512bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _BF16),
    Level(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        (*_BF16, "amx_tile", "amx_int8", "amx_bf16"),
    ),
)


def all_levels() -> tuple[Level, ...]:
    """Return the levels of instruction sets of this processor architecture, the lowest first."""
    return _X86_LEVELS if platform.machine() in _X86 else (PLAIN,)


def supported_levels() -> tuple[Level, ...]:
    """Return the levels of instruction sets that this processor supports, the lowest first."""
    features = cpu_features()
    return tuple(level for level in all_levels() if features.issuperset(level.features))


def chosen_levels() -> tuple[Level, ...]:
    """Return the levels of instruction sets whose native libraries may be used, the highest first.

    These are all levels that the processor supports, or only the level that the environment variable
    YGGDRASIL_CPU_LEVEL names; for the name "none", the tuple is empty.

    Raises:
        ValueError: the variable names an unknown level, or one that the processor does not support.
    """
    selected = os.environ.get(VARIABLE)
    supported = supported_levels()
    if not selected:
        return supported[::-1]
    if selected == NONE:
        return ()
    found = tuple(level for level in supported if level.name == selected)
    if not found:
        names = ", ".join([*(level.name for level in supported), NONE])
        raise ValueError(f"{VARIABLE}={selected} names no level of this processor; it has {names}")
    return found


@cache
def cpu_features() -> frozenset[str]:
    """Return an x86 processor's feature flags from /proc/cpuinfo; an empty set on other systems or processors."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()
