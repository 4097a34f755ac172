"""The machine's description, fingerprint and slug."""

import dataclasses
import re

import pytest

from yggdrasil.artifacts.machine import Machine, current_machine, parse_cpu_quota, parse_cpuinfo
from yggdrasil.artifacts.parsing import parse_dataclass
from yggdrasil.artifacts.plain import to_plain

MACHINE = Machine(
    cpu="AMD EPYC",
    cpu_family="26.2",
    architecture="x86_64",
    isa=("avx2", "avx512_bf16"),
    cores=2,
    memory_gib=24,
    accelerator=None,
    os="Linux 6.1",
)

X86 = """processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu amx_bf16 avx2 avx512f avx512_bf16 sse2

processor\t: 1
model name\t: another
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"


@pytest.mark.parametrize(
    "change",
    [{"cpu": "AMD EPYC 2"}, {"cpu_family": "25.1"}, {"isa": ("avx2",)}, {"cores": 4}, {"accelerator": "NVIDIA H200"}],
)
def test_fingerprint_follows_what_changes_timings(change: dict[str, object]) -> None:
    assert dataclasses.replace(MACHINE, **change).fingerprint != MACHINE.fingerprint  # type: ignore[arg-type]


def test_fingerprint_ignores_the_rest() -> None:
    other = dataclasses.replace(MACHINE, memory_gib=48, os="Linux 6.2", architecture="amd64")

    assert other.fingerprint == MACHINE.fingerprint
    assert other.slug == MACHINE.slug


def test_fingerprint_is_stable_across_releases() -> None:
    # sha256 of '["AMD EPYC", "26.2", ["avx2", "avx512_bf16"], 2, null]', first eight digits: plans on disk carry it.
    assert MACHINE.fingerprint == "1c827238"


def test_slug_and_description() -> None:
    assert MACHINE.slug == f"amd-epyc-2c-{MACHINE.fingerprint}"
    assert MACHINE.describe() == "AMD EPYC (family 26.2), 2 cores, avx2 avx512_bf16, 24 GiB, no accelerator, Linux 6.1"


@pytest.mark.parametrize(
    ("cpu", "start"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c-2c-nvidia-h200-"),
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-2c-nvidia-h200-"),
        ("???", "cpu-2c-nvidia-h200-"),
    ],
)
def test_slug_drops_noise(cpu: str, start: str) -> None:
    assert dataclasses.replace(MACHINE, cpu=cpu, accelerator="NVIDIA H200").slug.startswith(start)


def test_cpuinfo() -> None:
    name = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"
    assert parse_cpuinfo(X86) == (name, "6.143", ("avx2", "avx512f", "avx512_bf16", "amx_bf16"))
    assert parse_cpuinfo(ARM) == ("ARM 0x41 0xd4f", "", ("asimd", "i8mm", "bf16", "sve"))
    assert parse_cpuinfo("") == ("", "", ())


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000\n", 2), ("150000 100000", 2), ("1000 100000", 1), ("max 100000", None), ("", None)],
)
def test_cpu_quota(text: str, cores: int | None) -> None:
    assert parse_cpu_quota(text) == cores


def test_current_machine() -> None:
    machine = current_machine()

    assert machine == current_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert re.fullmatch(r"[a-z0-9-]+-[0-9a-f]{8}", machine.slug)
    assert parse_dataclass(Machine, to_plain(machine), "x.yaml") == machine
