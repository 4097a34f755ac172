"""Drafter over an EAGLE head or MTP module: grows an Equal-Growth Tree with one step per level."""

from collections.abc import Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.eagle.steps import EagleCall, HeadStep, LevelStep
from yggdrasil.drafters.heads.loading import LoadedHead
from yggdrasil.drafters.heads.text_drafter import TextHeadDrafter, WaitingStates
from yggdrasil.drafters.level_drafter import FinishStep, LevelSteps
from yggdrasil.drafters.passed_rows import PassedRows
from yggdrasil.runtime.graphs import Launch
from yggdrasil.runtime.passes import HostBuffer, fitting
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree

SHORT_HEADS = 2, 4  # widths of steps for the few tokens that most iterations accept: a padded row costs a full one


class HeadDrafter(TextHeadDrafter):
    """Drafter over an EAGLE head or MTP module, which has a KV cache.

    The cache has a row for every accepted token but the first, computed from the target's hidden states. Rows of
    drafted tokens, computed from the head's own outputs, follow in the tree's slots and are overwritten.
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
        self.head_widths = sorted({*(min(short, head_width) for short in SHORT_HEADS), head_width, *prefill_widths})
        self._tokens = HostBuffer(self.head_widths[-1], device)
        size = settings.num_states * settings.target_hidden_size
        states = torch.zeros(self.head_widths[-1], size, dtype=dtype, device=device)
        waiting = WaitingStates(head.layers, states)
        super().__init__(runner, waiting, head.layers, knots.to(device), self.head_widths[0], tree, head_width)
        self._features = torch.zeros(tree.num_nodes, settings.hidden_size, dtype=dtype, device=device)
        self._span, self._place = HostBuffer(2, device), HostBuffer(2, device)
        self.levels = LevelSteps(runner, self._place)
        call, rows = EagleCall(loaded), torch.arange(max(widths), device=device)
        shared = [self.knots, self._features, *tree.draft_tensors()]
        for width in self.head_widths:
            inputs = [self._tokens.tensor[:width], states[:width], self._span.tensor, *shared]
            runner.define("head", width, HeadStep(call), inputs)
        for width in widths:
            inputs = [self._place.tensor, rows[:width]]
            runner.define("grow", width, LevelStep(call), [*inputs, *shared])
            runner.define("finish", width, FinishStep(), [*inputs, *tree.tensors()])

    def pretend_context(self, length: int, token: int) -> None:
        """Act as if ``length`` tokens were cached and the token id ``token`` were the tree's root, to time steps.

        No cache entry is computed, so drafts are arbitrary until the next ``begin``.
        """
        super().pretend_context(length, token)
        self._place.write(length - 1, 1)

    def _draft_head(self) -> None:
        """Read the accepted tokens that are not cached, each with the target's hidden state that precedes it."""
        if not len(self._waiting):  # the root is read again, to compute its candidates
            self._waiting.requeue_last()
        tokens = self._text.tokens
        first = len(tokens) - len(self._waiting)
        for count in self._waiting.chunks():
            self._tokens.write(*tokens[first : first + count])
            self._span.write(first, count)
            self.runner.launch(("head", fitting(self.head_widths, count)))
            first += count
        self._text.num_rows = len(tokens)

    def _next_head(self, passed: PassedRows) -> Launch:
        head = self.runner.step("head", passed.most)

        def run() -> Sequence[Tensor]:
            root, count = passed.root() - 1, passed.count()  # the root's slot
            self._tokens.tensor[: passed.most].copy_(passed.tokens())
            self._waiting.take(passed.states())
            self._span.tensor.copy_(torch.cat([root - count + 1, count]))
            self._place.tensor[:1].copy_(root)
            return head()

        return run

    @property
    def root_position(self) -> int:
        """Cache slot of the tree's root, one less than its index in the text: the first token has no cache entry."""
        return len(self._text.tokens) - 1
