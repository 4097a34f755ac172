"""Levels of instruction sets: one library of the CPU operators for each, chosen by what the processor has.

Needs the standard library alone: ``setup.py`` reads it before anything is installed.
"""

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

VARIABLE = "YGGDRASIL_CPU_LEVEL"  # the environment variable that selects a level by name
NONE = "none"  # its value that selects the portable operators, without a library
_X86 = ("x86_64", "AMD64")


class Level(NamedTuple):
    """A set of instructions that a library may use."""

    name: str
    flags: tuple[str, ...]  # of GCC and Clang
    features: tuple[str, ...]  # as /proc/cpuinfo names what a processor must have


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni")
_BF16 = (*_AVX512, "avx512_bf16")
PLAIN = Level("plain", (), ())  # plain C++: what a compiler makes for any processor of this architecture
_X86_LEVELS = (
    PLAIN,
    Level("avx2", ("-march=x86-64-v3",), _AVX2),
    Level("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), (*_AVX2, "avx_vnni")),
    Level("avx512", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512),
    Level("avx512bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _BF16),
    Level(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        (*_BF16, "amx_tile", "amx_int8", "amx_bf16"),
    ),
)


def all_levels() -> tuple[Level, ...]:
    """Levels of this architecture, each needing more than the ones before it."""
    return _X86_LEVELS if platform.machine() in _X86 else (PLAIN,)


def supported_levels() -> tuple[Level, ...]:
    """Those that this processor has, the lowest first."""
    features = cpu_features()
    return tuple(level for level in all_levels() if features.issuperset(level.features))


def chosen_levels() -> tuple[Level, ...]:
    """Levels whose libraries may be used here, the best first: all that the processor has, or the one that is selected.

    Raises:
        ValueError: the environment selects a level that there is not, or that the processor does not have.
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
    """What the processor has, as Linux names it; nothing elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()
