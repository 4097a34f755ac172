"""What captured steps may not do: wait for the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from yggdrasil.runtime.graphs import Recorder

# Operators whose result the host needs at once: on a GPU each would wait for the device, and none can be captured.
WAITING = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::masked_select"}


class NoWaiting(TorchDispatchMode):
    """Refuses operators that a GPU could only answer by waiting."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        is_masked = name.startswith("aten::index") and any(
            index is not None and index.dtype == torch.bool
            for argument in args
            if isinstance(argument, list | tuple)
            for index in argument
        )
        if name in WAITING or is_masked:
            raise AssertionError(f"a step calls {name}")
        return function(*args, **(kwargs or {}))


def refuse_waiting(monkeypatch):
    """From now on what a recorder runs fails where it calls such an operator."""
    run = Recorder.run

    def watched(self, work):
        with NoWaiting():
            return run(self, work)

    monkeypatch.setattr(Recorder, "run", watched)
