"""Copies of a text's KV entries outside the cache, so that generation can resume after the cache held another text.

Dims: H key heads, R rows, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.artifacts.memory import new_region
from yggdrasil.runtime.kept_text import KeptText
from yggdrasil.runtime.runner import ModelRunner


@dataclass(frozen=True)
class KeptRows:
    """An exact copy of a text's recurrent states and of its KV entries, which are copied to host memory."""

    text: KeptText
    rows: Tensor  # [sum of H * R * D]: the text's entries of each tensor of ``StaticCache.rows``, flattened, in order

    @classmethod
    def of(cls, runner: ModelRunner, is_wanted: Callable[[], bool] = lambda: True) -> "KeptRows | None":
        """Return a copy of the text, KV entries and recurrent states in the runner's cache.

        Only the tokens whose KV entries can be reused are copied (``KeptText.num_kept``).

        Args:
            is_wanted: called before each KV tensor is copied; if it returns False, ``of`` returns None at once.
        """
        states = None if runner.states is None else runner.states.copy()
        text = KeptText(states)
        count = runner.text.num_kept
        text.begin(runner.text.tokens[:count], count, runner.text.lead)
        tensors = runner.cache.rows()
        size = sum(each[:, :count].numel() for each in tensors)
        kept = cls(text, _new_rows(size, tensors[0]))
        for part, cached in zip(kept._parts(tensors), tensors, strict=True):
            if not is_wanted():
                return None
            part.copy_(cached[:, :count])
        return kept

    @staticmethod
    def bytes_of(runner: ModelRunner) -> int:
        """Return the bytes of KV entries that ``of`` would copy from the runner's cache, without recurrent states."""
        count = runner.text.num_kept
        return sum(each[:, :count].nbytes for each in runner.cache.rows())

    @property
    def num_bytes(self) -> int:
        """Size of the copy in bytes, recurrent states included."""
        states = self.text.states
        return self.rows.nbytes + (0 if states is None else states.num_bytes)

    def restore(self, runner: ModelRunner) -> None:
        """Write the copied text, KV entries and recurrent states back to the cache of ``runner``.

        The copy must have been made from a runner of the same model and dtype.
        """
        tensors = runner.cache.rows()
        for part, cached in zip(self._parts(tensors), tensors, strict=True):
            cached[:, : self.text.num_rows].copy_(part)
        if runner.states is not None and self.text.states is not None:
            runner.states.restore(self.text.states)
        runner.text.begin(self.text.tokens, self.text.num_rows, self.text.lead)

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Split ``rows`` into views [H, R, D], one for each of the cache's ``tensors``."""
        shapes = [each[:, : self.text.num_rows].shape for each in tensors]
        parts = self.rows.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _new_rows(count: int, like: Tensor) -> Tensor:
    """Return an uninitialised tensor [count] in host memory, of the dtype of ``like``.

    If ``like`` is on a GPU, the memory is pinned, so that copies are faster. If ``like`` is on a CPU, the memory is
    mapped outside the heap, so that it returns to the system when the tensor is freed.
    """
    if like.device.type != "cpu" or count == 0:
        return torch.empty(count, dtype=like.dtype, pin_memory=like.device.type == "cuda" and count > 0)
    return torch.frombuffer(new_region(count * like.element_size()), dtype=like.dtype)
