"""A small language model as drafter: grows an Equal-Growth Tree with one compiled step a level."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.steps import FinishStep, GrowStep, HeadStep
from yggdrasil.models.buffers import HostBuffer
from yggdrasil.models.graphs import Capture
from yggdrasil.models.runner import ModelRunner, PrefillStep
from yggdrasil.tree.token_tree import TokenTree

SHORT_HEAD = 4  # tokens most iterations add; a longer accepted path takes the full head


class DraftModel:
    """Drafter over a causal language model that shares the target's tokenizer.

    Its cache keeps, for each certain token it has read, the row of its position; tree nodes live in the slots from the
    root on and are simply overwritten. ``head_width`` bounds how many certain tokens one head step reads.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        runner: ModelRunner,
        tree: TokenTree,
        widths: Sequence[int],
        head_width: int,
        prefill_widths: Sequence[int],
        knots: Tensor,
    ) -> None:
        device = runner.loaded.device
        self.name = f"model {runner.loaded.name}"
        self.runner = runner
        self.head_widths = sorted({min(SHORT_HEAD, head_width), head_width})
        self.prefill_widths = sorted(prefill_widths)
        self.knots = knots.to(device)
        self._tokens = HostBuffer(max(head_width, *prefill_widths), device)
        self._span = HostBuffer(2, device)
        self._last = HostBuffer(1, device)
        self._place = HostBuffer(2, device)
        self._drafts: dict[tuple[int, int], Capture] = {}
        self._certain: list[int] = []
        self._num_read = 0  # certain tokens whose keys are in the cache, at the slot of their position
        tree_buffers = tree.tensors()
        for width in self.prefill_widths:
            inputs = [self._tokens.tensor[:width], self._span.tensor[:1], self._last.tensor]
            runner.define("prefill", width, PrefillStep(runner.call, width), inputs)
        for width in self.head_widths:
            head_inputs = [self._tokens.tensor[:width], self._span.tensor, self.knots, *tree_buffers]
            runner.define("head", width, HeadStep(runner.call, width), head_inputs)
        for width in widths:
            runner.define("grow", width, GrowStep(runner.call, width), [self._place.tensor, self.knots, *tree_buffers])
            runner.define("finish", width, FinishStep(width), [self._place.tensor, *tree_buffers])

    def begin(self, tokens: Sequence[int]) -> None:
        self._certain = list(tokens)
        self._num_read = 0

    def place_at(self, length: int, token: int) -> None:
        """Stand behind ``length`` tokens as if they had been read, with ``token`` as the root; for timing steps."""
        self._certain = [token] * (length + 1)
        self._num_read = length
        self._place.write(length, 1)

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        self._certain.extend(tokens)

    def head(self, tree: TokenTree) -> None:
        """Read every certain token not yet read, the last ones (root included) in the head step."""
        widest = self.head_widths[-1]
        while len(self._certain) - self._num_read > widest:
            self._prefill(len(self._certain) - self._num_read - widest)
        start = min(self._num_read, len(self._certain) - 1)  # the root's logits are wanted even if it was read before
        pending = self._certain[start:]
        self._tokens.write(*pending)
        self._span.write(start, len(pending))
        self.runner.launch("head", next(width for width in self.head_widths if width >= len(pending)))
        self._num_read = len(self._certain)

    def grow(self, tree: TokenTree, width: int, depth: int) -> None:
        root = len(self._certain) - 1
        if self.runner.recorder is not None:
            self._place.write(root)
            self.draft(width, depth)()
            return
        step = self.runner.step("grow", width)
        for level in range(depth - 1):
            self._place.write(root, 1 + level * width)
            step()
        self._place.write(root, 1 + (depth - 1) * width)
        self.runner.step("finish", width)()

    def warm(self, depths: Sequence[int]) -> None:
        """Record every draft of ``depths`` now. Only between requests: the recorded work runs once."""
        for name, width in self.runner.defined:
            if name in ("prefill", "head"):
                self.runner.captured(name, width).prepare()
            elif name == "grow":
                for depth in depths:
                    self.draft(width, depth).prepare()

    def draft(self, width: int, depth: int) -> Capture:
        """All levels below a root as one capture; the place of the next level is counted on the device."""
        draft = self._drafts.get((width, depth))
        if draft is None:
            assert self.runner.recorder is not None
            grow, finish = self.runner.step("grow", width), self.runner.step("finish", width)
            first = self._place.tensor[1:]  # number of the level's first node

            def levels() -> Sequence[Tensor]:
                first.fill_(1)
                for _ in range(depth - 1):
                    grow()
                    first.add_(width)
                return finish()

            draft = self._drafts[width, depth] = self.runner.recorder.capture(levels)
        return draft

    def _prefill(self, count: int) -> None:
        width = next((w for w in self.prefill_widths if w >= count), self.prefill_widths[-1])
        chunk = self._certain[self._num_read : self._num_read + min(count, width)]
        self._tokens.write(*chunk)
        self._span.write(self._num_read)
        self._last.write(len(chunk) - 1)
        self.runner.launch("prefill", width)
        self._num_read += len(chunk)


def identity_knots() -> Tensor:
    """Calibration table that trusts the drafter's own probabilities (bounded below 1)."""
    return torch.linspace(-12.0, -1e-4, 128)
