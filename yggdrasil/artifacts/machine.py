"""Properties of this machine on which timings depend."""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MOST_THREADS = 1024  # the highest number of threads accepted as an option
# The instruction sets that decide how fast a matrix product runs; the names are those of /proc/cpuinfo.
_RELEVANT_ISA = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16", "sme"),
)
# One of these device nodes exists wherever torch can see an accelerator (NVIDIA, Tegra, WSL, ROCm).
_ACCELERATOR_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
_NOISE = re.compile(r"\((r|tm|c)\)|\d+-core|processor|\bcpu\b|@.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as this process sees it. ``fingerprint`` covers only the fields that change timings."""

    cpu: str  # model name
    cpu_family: str  # "26.2": family and model; clouds hide the generation behind one model name
    architecture: str
    isa: tuple[str, ...]  # the relevant instruction sets, in a fixed order
    cores: int  # usable by this process: affinity and container quota
    memory_gib: int  # physical memory, rounded; 0 if unknown
    accelerator: str | None  # name of the first GPU that torch sees; None without one
    os: str

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits of a hash of cpu, cpu_family, isa, cores and accelerator."""
        fields = [self.cpu, self.cpu_family, self.isa, self.cores, self.accelerator]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:8]

    @property
    def slug(self) -> str:
        """A readable file name that ends in the fingerprint, such as ``amd-epyc-2c-1a2b3c4d``."""
        parts = [_slugged(_NOISE.sub(" ", self.cpu)) or "cpu", f"{self.cores}c"]
        if self.accelerator is not None:
            parts.append(_slugged(self.accelerator))
        return "-".join([*parts, self.fingerprint])

    def describe(self) -> str:
        """Return one line: processor, cores, instruction sets, memory, accelerator and system."""
        family = f" (family {self.cpu_family})" if self.cpu_family else ""
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        isa = " ".join(self.isa) or self.architecture
        accelerator = self.accelerator or "no accelerator"
        return f"{self.cpu}{family}, {cores}, {isa}, {self.memory_gib} GiB, {accelerator}, {self.os}"


def current_machine() -> Machine:
    """Describe the machine of this process: processor, instruction sets, usable cores, memory, accelerator, system.

    torch is imported only if ``may_have_accelerator``.
    """
    cpu, cpu_family, isa = _cpu()
    return Machine(
        cpu=cpu,
        cpu_family=cpu_family,
        architecture=platform.machine(),
        isa=isa,
        cores=usable_cores(),
        memory_gib=_memory_gib(),
        accelerator=_accelerator(),
        os=f"{platform.system()} {platform.release()}",
    )


def parse_cpuinfo(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Return (model name, "FAMILY.MODEL", instruction sets) of the first CPU in the text of ``/proc/cpuinfo``.

    Only instruction sets that change timings are returned, in a fixed order. Missing parts are empty. On ARM, which has
    no model names, the name consists of implementer and part numbers.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name", "")
    family = ".".join(fields[key] for key in ("cpu family", "model") if key in fields)
    if not name and "cpu implementer" in fields:
        name = f"ARM {fields['cpu implementer']} {fields.get('cpu part', '')}".strip()
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return name, family, tuple(flag for flag in _RELEVANT_ISA if flag in flags)


def parse_cpu_quota(text: str) -> int | None:
    """Return the cores, rounded up, that a cgroup's ``cpu.max`` (``QUOTA PERIOD``) allows; None: all."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdecimal() or not period.isdecimal():
        return None
    return max(1, math.ceil(int(quota) / int(period)))


def _cpu() -> tuple[str, str, tuple[str, ...]]:
    name, family, isa = parse_cpuinfo(_read_text(Path("/proc/cpuinfo")))
    if not name and sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return name or platform.processor() or platform.machine(), family, isa


def usable_cores() -> int:
    """Return how many CPU cores this process may use: the smaller of its affinity mask and its cgroup quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = parse_cpu_quota(_read_text(Path("/sys/fs/cgroup/cpu.max")))
    return allowed if quota is None else min(allowed, quota)


def _memory_gib() -> int:
    """Return physical memory rounded to GiB, or 0 if it is unknown (Windows)."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return 0
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)


def may_have_accelerator() -> bool:
    """Return whether PyTorch may see a CUDA or ROCm GPU here, without importing PyTorch. False is certain.

    On Linux, the result is whether one of the device files of accelerators exists. It is False on macOS and True on
    other systems.
    """
    return sys.platform != "darwin" and (
        sys.platform != "linux" or any(Path(node).exists() for node in _ACCELERATOR_NODES)
    )


def _accelerator() -> str | None:
    if not may_have_accelerator():
        return None
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _slugged(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
