"""Drafter over Medusa heads: one pass drafts all depths, and a tree grows from its candidates."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.heads.loading import LoadedHead
from yggdrasil.drafters.heads.marginals import Marginals
from yggdrasil.drafters.heads.medusa.module import MedusaSettings
from yggdrasil.drafters.heads.medusa.steps import MedusaCall, MedusaStep
from yggdrasil.drafters.level_drafter import LevelDrafter
from yggdrasil.drafters.passed_rows import PassedRows
from yggdrasil.drafters.protocol import Capabilities, DraftSteps
from yggdrasil.runtime.graphs import Launch
from yggdrasil.runtime.passes import HostBuffer
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class MedusaDrafter(LevelDrafter):
    """Drafter over Medusa heads. It reads the hidden state that precedes the root, and has no KV cache."""

    def __init__(
        self, runner: ModelRunner, head: LoadedHead, tree: TokenTree, widths: Sequence[int], knots: Tensor
    ) -> None:
        loaded, settings = head.loaded, head.settings
        assert isinstance(settings, MedusaSettings)
        device = loaded.device
        super().__init__(1, tree, tree.num_nodes)
        self.name = f"heads {loaded.name}"
        self.opened = head
        self.runner = runner
        self.knots = knots.to(device)
        (self._layer,) = head.layers
        # Only the hidden state that precedes the root is read. It arrives with the root, so a prompt needs no others.
        self.capabilities = Capabilities(
            layers=head.layers, steps=DraftSteps(runner, self.knots, self.head, self.pretend_context), plants_root=True,
            num_kept=len,
        )  # fmt: skip
        self._last, self._length = 0, 0
        self._token = HostBuffer(1, device)
        self._state = torch.zeros(1, settings.hidden_size, dtype=loaded.dtype, device=device)
        marginals = Marginals(runner, tree, widths, settings.num_heads, self.knots)
        self.levels = marginals.levels
        inputs = [self._token.tensor, self._state, *marginals.written]
        runner.define("head", 1, MedusaStep(MedusaCall(loaded)), inputs)

    @property
    def num_certain(self) -> int:
        """Number of committed tokens of the request."""
        return self._length

    @property
    def is_current(self) -> bool:
        """True: only the last committed token is read, by the next head draft."""
        return True

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with the committed ``tokens`` (token ids, at least one).

        Only the number of tokens and the last token, the next tree's root, are stored. The hidden state that the heads
        read comes with the next ``extend``.
        """
        self._last, self._length = tokens[-1], len(tokens)
        self._headed = self._next = self._grown = None

    def pretend_context(self, length: int, token: int) -> None:
        """Act as if ``length`` tokens preceded the tree's root, the token id ``token``, to time steps."""
        self._next = self._grown = None
        self._last, self._length = token, length + 1

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids, at least one), and keep the hidden state before the last one.

        Args:
            states: for the layer that the heads read, hidden states [len(tokens), H]; row i is the hidden state of the
                token before ``tokens[i]``. Only the last row is kept.
        """
        self._last, self._length = tokens[-1], self._length + len(tokens)
        self._state.copy_(states[self._layer][-1:])
        self._has_read(len(tokens))

    def _draft_head(self) -> None:
        self._token.write(self._last)
        self.runner.launch(("head", 1))

    def _next_head(self, passed: PassedRows) -> Launch:
        head = self.runner.step("head", 1)

        def run() -> Sequence[Tensor]:
            last = passed.count() - 1
            self._token.tensor.copy_(passed.tokens()[last])
            self._state.copy_(passed.states()[last])
            return head()

        return run
