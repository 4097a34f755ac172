"""Hidden states of a pass by layer, for drafters that read the target's hidden states."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor


class LayerRows(Mapping[int, Tensor]):
    """Mapping from layer index to that layer's hidden states [len(rows), H] at the ascending ``rows`` of a pass.

    Rows are selected only on access, since every PyTorch call right after a pass, with cold processor caches, takes 10
    us.
    """

    def __init__(self, layers: Sequence[int], outputs: Sequence[Tensor], rows: Sequence[int]) -> None:
        self.whole = dict(zip(layers, outputs, strict=True))  # layer -> states of all rows of the pass, [W, H]
        self.rows = rows

    def __getitem__(self, layer: int) -> Tensor:
        states, count = self.whole[layer], len(self.rows)
        if self.rows[-1] < count:  # the rows are 0 to count - 1, as mostly: no copy
            return states[:count]
        return states.index_select(0, torch.tensor(self.rows, device=states.device))

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)
