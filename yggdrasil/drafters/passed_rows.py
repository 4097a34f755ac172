"""The accepted rows of a target pass, on the device, for drafts that are launched before the host knows the rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from yggdrasil.runtime.passes import HostBuffer


class PassedRows:
    """Copies of a pass's result and of the hidden states of its rows, at fixed addresses.

    ``write`` is called for every pass; the other methods are for work within CUDA graphs, and return new tensors.

    Args:
        width: the largest number of rows of a pass.
        most: the most committed tokens of a pass (accepted tokens and the bonus token) that a head draft reads.
        num_layers: number of the target's layers whose hidden states the drafter reads.
        hidden_size, dtype: size and dtype of these hidden states.
    """

    def __init__(
        self, width: int, most: int, num_layers: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.most = most
        # The number n of accepted rows, a flag, from 2 on the n rows, and from 2 + W on the n tokens chosen after them.
        self._summary = torch.zeros(2 + 2 * max(width, most), dtype=torch.int64, device=device)
        self._place = HostBuffer(2, device)  # committed tokens before the pass, rows of the pass
        self._place.write(1, 1)  # for graphs that run once before any pass
        self._states = torch.zeros(width, num_layers, hidden_size, dtype=dtype, device=device)

    def write(self, outputs: Sequence[Tensor], rows: int, num_certain: int) -> None:
        """Copy the result of a launched pass without waiting for it.

        Args:
            outputs: the pass's packed result, which begins with the first 2 + 2 * ``rows`` entries of the summary of
                ``VerifyStep``, then the hidden states [rows, H] of each layer.
            rows: number of rows of the pass.
            num_certain: number of committed tokens before the pass, prompt included.
        """
        num_words = 2 + 2 * rows
        self._summary[:num_words].copy_(outputs[0][:num_words])
        for number, states in enumerate(outputs[1:]):
            self._states[:rows, number].copy_(states)
        self._place.write(num_certain, rows)

    def count(self) -> Tensor:
        """Return the number of tokens that the pass commits, bonus token included, [1] int64, at most ``most``."""
        return self._summary[:1].clamp(1, self.most)

    def root(self) -> Tensor:
        """Return the index in the text of the last token that the pass commits, the next tree's root, [1] int64."""
        return self._place.tensor[:1] + self.count() - 1

    def tokens(self) -> Tensor:
        """Return the ids of the tokens that the pass commits, [most] int64. Entries from ``count`` on are arbitrary."""
        first = 2 + self._place.tensor[1:]
        return self._summary[(first + self._numbers()).clamp(max=len(self._summary) - 1)]

    def states(self) -> Tensor:
        """Return the hidden states from which ``tokens`` were chosen, [most, num_layers * H], layers concatenated."""
        rows = self._summary[2 + self._numbers()]
        return self._states[rows.clamp(0, len(self._states) - 1)].flatten(1)

    def _numbers(self) -> Tensor:
        return torch.arange(self.most, device=self._summary.device)
