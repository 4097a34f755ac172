"""Medusa's heads as drafter: one compiled pass guesses all depths, and a tree grows on what it found."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.heads.loading import LoadedHead
from yggdrasil.drafters.heads.marginals import Marginals
from yggdrasil.drafters.heads.medusa import MedusaSettings
from yggdrasil.drafters.heads.medusa_steps import MedusaCall, MedusaStep
from yggdrasil.runtime.buffers import HostBuffer
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class MedusaDrafter:
    """Drafter over Medusa's heads. It reads one state, that before the root, and keeps no rows of any text."""

    def __init__(
        self, runner: ModelRunner, head: LoadedHead, tree: TokenTree, widths: Sequence[int], knots: Tensor
    ) -> None:
        loaded, settings = head.loaded, head.settings
        assert isinstance(settings, MedusaSettings)
        device = loaded.device
        self.name = f"heads {loaded.name}"
        self.opened = head
        self.runner = runner
        self.hidden_layers = head.layers
        self.knots = knots.to(device)
        self._last = 0
        self._token = HostBuffer(1, device)
        self._state = torch.zeros(1, settings.hidden_size, dtype=loaded.dtype, device=device)
        self._marginals = Marginals(runner, tree, widths, settings.num_heads, self.knots)
        inputs = [self._token.tensor, self._state, *self._marginals.written]
        runner.define("head", 1, MedusaStep(MedusaCall(loaded)), inputs)

    def num_kept(self, tokens: Sequence[int]) -> int:
        """All: only the state before the root is read, which comes with it."""
        return len(tokens)

    def begin(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1]

    def place_at(self, length: int, token: int) -> None:
        """Stand behind ``length`` tokens, with ``token`` as the root; for timing steps."""
        self._last = token

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        (layer,) = self.hidden_layers
        self._last = tokens[-1]
        self._state.copy_(hidden[layer][-1:])

    def head(self, tree: TokenTree) -> None:
        self._token.write(self._last)
        self.runner.launch("head", 1)

    def grow(self, tree: TokenTree, width: int, depth: int) -> None:
        self._marginals.grow(width, depth)
