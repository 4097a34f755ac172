"""Drafter over a block head: one pass finds candidates of all depths, and a tree grows from them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.heads.block.config import BlockSettings
from yggdrasil.drafters.heads.block.steps import BlockCall, BlockStep, ReadStep, SuccessorLevelStep, SuccessorStep
from yggdrasil.drafters.heads.eagle.drafter import SHORT_HEADS
from yggdrasil.drafters.heads.loading import LoadedHead
from yggdrasil.drafters.heads.marginals import Marginals
from yggdrasil.drafters.heads.text_drafter import TextHeadDrafter, WaitingStates
from yggdrasil.drafters.passed_rows import PassedRows
from yggdrasil.runtime.graphs import Capture, Launch
from yggdrasil.runtime.passes import HostBuffer, fitting
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class BlockDrafter(TextHeadDrafter):
    """Drafter over a block head.

    The KV cache has a row for every accepted token but the last, computed from the target's hidden state at the token's
    own position. Blocks are written after these rows and overwritten later. Hidden states arrive with the token that
    follows them, so the drafter's text omits the first token: row i arrived with token i of that text.
    """

    def __init__(
        self,
        runner: ModelRunner,
        head: LoadedHead,
        tree: TokenTree,
        widths: Sequence[int],
        read_width: int,
        prefill_widths: Sequence[int],
        knots: Tensor,
    ) -> None:
        loaded, settings = head.loaded, head.settings
        assert isinstance(settings, BlockSettings)
        device = loaded.device
        self.name = f"block head {loaded.name}"
        self.opened = head
        self.read_widths = sorted({*(min(short, read_width) for short in SHORT_HEADS), read_width, *prefill_widths})
        size = settings.num_states * settings.target_hidden_size
        states = torch.zeros(self.read_widths[-1], size, dtype=loaded.dtype, device=device)
        super().__init__(runner, WaitingStates(head.layers, states), head.layers, knots.to(device), 1, tree, read_width)
        self._token, self._start, self._root = (HostBuffer(1, device) for _ in range(3))
        call = BlockCall(loaded, min(settings.num_guesses, read_width - 1))  # the maximum depth of a tree
        for width in self.read_widths:
            runner.define("read", width, ReadStep(call), [states[:width], self._start.tensor])
        shared = runner, tree, widths, call.num_guesses, self.knots
        if settings.successors is None:
            self._marginals = Marginals(*shared)
            head_step: BlockStep | SuccessorStep = BlockStep(call)
        else:
            more = [
                torch.zeros(size, dtype=loaded.dtype, device=device)
                for size in ((call.num_guesses, settings.hidden_size), (tree.num_nodes, settings.rank))
            ]
            most = max(min(settings.num_successors, settings.draft_vocab_size), tree.candidates)
            level = SuccessorLevelStep(call)
            self._marginals = Marginals(*shared, level=level, more=more, num_candidates=most)
            head_step = SuccessorStep(call)
        self.levels = self._marginals.levels
        inputs = [self._token.tensor, self._root.tensor, *self._marginals.written]
        runner.define("head", 1, head_step, inputs)

    def _draft_head(self) -> None:
        """Read the queued hidden states in chunks; the launch of the last chunk also drafts after the text."""
        tokens = self._text.tokens
        self._token.write(tokens[-1])
        self._root.write(len(tokens))
        first = len(tokens) - len(self._waiting)
        for count in self._waiting.chunks() if len(self._waiting) else [0]:
            self._start.write(first)
            first += count
            read = [("read", fitting(self.read_widths, count))] if count else []
            self.runner.launch(*read, *([("head", 1)] if first == len(tokens) else []))
        self._text.num_rows = len(tokens)

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Yield the CUDA graphs that drafts of each of ``depths`` draft steps launch. Prepare them between requests."""
        yield from super().captures(depths)
        yield from (self.runner.captured(("read", width), ("head", 1)) for width in self.read_widths)

    def _next_head(self, passed: PassedRows) -> Launch:
        read, head = self.runner.step("read", passed.most), self.runner.step("head", 1)

        def run() -> Sequence[Tensor]:
            root, count = passed.root(), passed.count()
            self._waiting.take(passed.states())
            self._start.tensor.copy_(root - count)
            self._token.tensor.copy_(passed.tokens()[count - 1])
            self._root.tensor.copy_(root)
            read()
            return head()

        return run
