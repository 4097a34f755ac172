"""Models that are open in this process: plans of the same one read the same tensors.

Beside each other they take the memory of one; and a pass over a copy that lies elsewhere has been a hundredth faster or
slower, which is no difference between plans.
"""

from threading import Lock
from weakref import WeakValueDictionary

import torch

from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.source import Source
from yggdrasil.runtime.kept_tensors import open_model
from yggdrasil.runtime.loaded import LoadedModel

_Key = tuple[str, str, torch.dtype, torch.device, int, Weights, bool]
_open: WeakValueDictionary[_Key, LoadedModel] = WeakValueDictionary()  # until the last decoder lets go
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
    """The model as ``open_model`` gives it, unless it is open already, as it is on disk now.

    Raises:
        YggdrasilError: as ``open_model``.
    """
    key = (source.given, source.fingerprint(), dtype, device, num_threads, weights, is_described)
    with _opening:
        loaded = _open.get(key)
        if loaded is None:
            loaded = _open[key] = open_model(
                source, dtype, device, num_threads, weights=weights, is_described=is_described
            )
        return loaded
