"""A head as drafter: grows an Equal-Growth Tree with one compiled step a level, on states that the target computed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.heads.loading import LoadedHead
from yggdrasil.drafters.heads.settings import HeadSettings
from yggdrasil.drafters.heads.steps import HeadCall, HeadStep, LevelStep
from yggdrasil.drafters.heads.waiting import WaitingStates
from yggdrasil.drafters.steps import FinishStep
from yggdrasil.models.buffers import HostBuffer
from yggdrasil.models.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree
from yggdrasil.tree.widths import fitting

SHORT_HEADS = 2, 4  # tokens most iterations add: a padded row costs what another does, and no package of its own


class HeadDrafter:
    """Drafter over a head.

    Its cache keeps a row for every certain token but the first, computed from the target's states: what it drafted on
    its own outputs lies behind them, in the tree's slots, and is overwritten. The text that it keeps is without the
    first token too.
    """

    def __init__(
        self,
        runner: ModelRunner,
        head: LoadedHead,
        tree: TokenTree,
        widths: Sequence[int],
        head_width: int,
        prefill_widths: Sequence[int],
        knots: Tensor,
    ) -> None:
        loaded, settings = head.loaded, head.settings
        assert isinstance(settings, HeadSettings)
        device, dtype = loaded.device, loaded.dtype
        self.name = f"head {loaded.name}"
        self.opened = head
        self.runner = runner
        self.hidden_layers = head.layers
        self.head_widths = sorted({*(min(short, head_width) for short in SHORT_HEADS), head_width, *prefill_widths})
        self.knots = knots.to(device)
        self._tokens = HostBuffer(self.head_widths[-1], device)
        size = settings.num_states * settings.target_hidden_size
        states = torch.zeros(self.head_widths[-1], size, dtype=dtype, device=device)
        self._waiting = WaitingStates(head.layers, states)
        self._features = torch.zeros(tree.num_nodes, settings.hidden_size, dtype=dtype, device=device)
        self._span, self._place = HostBuffer(2, device), HostBuffer(2, device)
        self._text = runner.text  # certain tokens but the first
        self._first: int | None = None
        call, rows = HeadCall(loaded), torch.arange(max(widths), device=device)
        shared = [self.knots, self._features, *tree.tensors()]
        for width in self.head_widths:
            inputs = [self._tokens.tensor[:width], states[:width], self._span.tensor, *shared]
            runner.define("head", width, HeadStep(call), inputs)
        for width in widths:
            inputs = [self._place.tensor, rows[:width]]
            runner.define("grow", width, LevelStep(call), [*inputs, *shared])
            runner.define("finish", width, FinishStep(), [*inputs, *tree.tensors()])

    def num_kept(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` need no states any more."""
        if self._first is None or not tokens or tokens[0] != self._first:
            return 0
        return 1 + self._text.shared(tokens[1:])

    def begin(self, tokens: Sequence[int]) -> None:
        """Rows of the last request's text are kept up to the first token that differs.

        Those of ``tokens`` must be among them, but the first, as ``num_kept`` says.
        """
        kept = self.num_kept(tokens) - 1
        self._first = tokens[0]
        self._waiting.clear()
        self._text.begin(tokens[1:], max(kept, 0))

    def place_at(self, length: int, token: int) -> None:
        """Stand behind ``length`` tokens as if they had been read, with ``token`` as the root; for timing steps."""
        self._first = token
        self._text.pretend([token] * length, length - 1)
        self._waiting.clear()
        self._waiting.again()
        self._place.write(length - 1, 1)

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        self._text.tokens.extend(tokens)
        self._waiting.add(hidden, len(tokens))

    def head(self, tree: TokenTree) -> None:
        """Read every certain token not read yet, each with the target's state before it."""
        if not len(self._waiting):  # the root's candidates are wanted even if it was read before
            self._waiting.again()
        tokens = self._text.tokens
        first = len(tokens) - len(self._waiting)
        for count in self._waiting.chunks():
            self._tokens.write(*tokens[first : first + count])
            self._span.write(first, count)
            self.runner.launch("head", fitting(self.head_widths, count))
            first += count
        self._text.num_rows = len(tokens)

    def grow(self, tree: TokenTree, width: int, depth: int) -> None:
        root = len(self._text.tokens) - 1
        step = self.runner.step("grow", width)
        for level in range(depth - 1):
            self._place.write(root, 1 + level * width)
            step()
        self._place.write(root, 1 + (depth - 1) * width)
        self.runner.step("finish", width)()
