"""Shares loaded models within a process, so that several plans of one model use the same tensors.

This saves memory, and makes plans comparable: a pass over a copy at other addresses can be 1 % faster or slower.
"""

from threading import Lock
from weakref import WeakValueDictionary

import torch

from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.source import Source
from yggdrasil.runtime.kept_tensors import open_model
from yggdrasil.runtime.loaded import LoadedModel

_Key = tuple[str, str, torch.dtype, torch.device, int, Weights, bool]
_open: WeakValueDictionary[_Key, LoadedModel] = WeakValueDictionary()  # entries live as long as a decoder uses them
_opening = Lock()


def shared_model(
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    weights: Weights,
    *,
    is_described: bool = True,
) -> LoadedModel:
    """Return the model that this process has already loaded from the same files with the same options, or load it.

    A loaded model is shared as long as any caller holds a reference to it. The arguments are those of ``open_model``.

    Raises:
        YggdrasilError: the model cannot be loaded.
    """
    key = _key(source, dtype, device, num_threads, weights, is_described=is_described)
    with _opening:
        loaded = _open.get(key)
        if loaded is None:
            loaded = _open[key] = open_model(
                source, dtype, device, num_threads, weights=weights, is_described=is_described
            )
        return loaded


def is_shared(source: Source, dtype: torch.dtype, device: torch.device, num_threads: int, weights: Weights) -> bool:
    """Return whether ``shared_model`` has a loaded model for these arguments, with ``is_described`` True or False."""
    return any(_key(source, dtype, device, num_threads, weights, is_described=each) in _open for each in (True, False))


def _key(
    source: Source, dtype: torch.dtype, device: torch.device, num_threads: int, weights: Weights, *, is_described: bool
) -> _Key:
    return source.given, source.fingerprint(), dtype, device, num_threads, weights, is_described
