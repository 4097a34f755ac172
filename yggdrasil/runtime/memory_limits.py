"""Checks whether KV caches fit in memory, and measures free and used memory."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.states.snapshots import NUM_STATES

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CONTAINER = Path("/sys/fs/cgroup")


def check_cache_memory(models: Sequence[LoadedModel], max_length: int, capacity: int) -> None:
    """Check that all ``models`` support ``max_length`` tokens, and that their KV caches fit in free memory.

    Args:
        models: at least one, all on one device.
        max_length: length of the longest text, in tokens.
        capacity: number of slots of each cache.

    Raises:
        YggdrasilError: a model supports fewer tokens, or the caches do not fit.
    """
    for model in models:
        if max_length > model.max_context:
            raise YggdrasilError(
                f"max_length is {max_length}, but {model.name} was built for {model.max_context} tokens; give no more"
            )
    check_caches(models, max_length, capacity)


def check_caches(models: Sequence[LoadedModel], max_length: int, capacity: int) -> None:
    """Check that the KV caches of all ``models`` fit in free memory.

    The arguments are those of ``check_cache_memory``; ``max_length`` is only for the message.

    Raises:
        YggdrasilError: the caches do not fit.
    """
    needed = sum(cache_bytes(model, capacity) for model in models)
    left = free_bytes(models[0].device)
    if left is not None and needed > left:
        raise YggdrasilError(
            f"max_length is {max_length}, whose caches take {needed / 1e9:.1f} GB, but {left / 1e9:.1f} GB of memory "
            "are left; give less"
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory in bytes of a GPU, or of the machine if ``device`` is a CPU; None if unknown.

    GPU memory that PyTorch's allocator has reserved but no tensor uses counts as free.
    """
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return available_bytes() if device.type == "cpu" else None


def total_card_bytes() -> int | None:
    """Return the total memory of the first GPU in bytes; None without a GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def cache_bytes(model: LoadedModel, capacity: int) -> int:
    """Return the bytes of a model's KV cache of ``capacity`` slots plus its recurrent states with their copies."""
    return kv_bytes(model.sizes, model.dtype, capacity)


def kv_bytes(sizes: ModelSizes, dtype: torch.dtype, capacity: int) -> int:
    """Return the same sum as ``cache_bytes`` for a model of ``sizes`` whose KV cache is of ``dtype``."""
    elements = sum(2 * heads * size * capacity for heads, size in sizes.key_heads)
    recurrence = sizes.recurrence
    states = 0 if recurrence is None else 4 * recurrence.state_size * len(recurrence.layers)  # float32
    return elements * dtype.itemsize + NUM_STATES * states


def available_bytes() -> int | None:
    """Return the bytes of memory that are free without swapping, within a container's limit; None if unknown."""
    found = [left for left in (_left_on_machine(), _left_in_container()) if left is not None]
    return min(found, default=None)


def _left_on_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_container() -> int | None:
    """Return the bytes left of a container's memory limit; None without a limit.

    Cached file pages count as free: the system drops them before an allocation fails.
    """
    try:
        limit, taken, stat = ((_CONTAINER / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:
        return None
    if not limit.strip().isdecimal():  # "max": none
        return None
    shares = dict(line.split() for line in stat.splitlines())
    files = int(shares.get("inactive_file", 0)) + int(shares.get("active_file", 0))
    return max(int(limit) - int(taken) + files, 0)


def process_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None if unknown (not Linux)."""
    try:
        return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None
