"""What a pass says of its layers, for drafters that read the target's states."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor


class LayerRows(Mapping[int, Tensor]):
    """States at some layers [len(rows), H] of the ``rows`` of a pass, which ascend; taken out when they are asked for.

    Behind a pass, which has gone through every cache, each call of PyTorch takes ten microseconds.
    """

    def __init__(self, layers: Sequence[int], outputs: Sequence[Tensor], rows: Sequence[int]) -> None:
        self.whole = dict(zip(layers, outputs, strict=True))  # of all rows of the pass, [W, H] each
        self.rows = rows

    def __getitem__(self, layer: int) -> Tensor:
        states, count = self.whole[layer], len(self.rows)
        if self.rows[-1] < count:  # side by side, as they mostly are: no copy
            return states[:count]
        return states.index_select(0, torch.tensor(self.rows, device=states.device))

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)
