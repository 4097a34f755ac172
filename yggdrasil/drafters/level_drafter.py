"""Base class of drafters with compiled steps: a head draft, then levels with a fixed number of nodes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from yggdrasil.acceptance.coins import draw_key
from yggdrasil.drafters.protocol import Budget, Step
from yggdrasil.drafters.statistics.draws import NOTHING_DRAWN, draft_weights
from yggdrasil.runtime.graphs import Capture, Launch
from yggdrasil.runtime.passes import HostBuffer
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class LevelSteps:
    """Launcher of the grow and finish steps that ``runner`` defines, by level or as one capture.

    Args:
        place: [2] int64 input of the steps: the root's position or slot, and the index of a level's first node.
        before: optional work that a draft may begin with, in the same capture.
    """

    def __init__(self, runner: ModelRunner, place: HostBuffer, before: Launch | None = None) -> None:
        self._runner, self._place, self._before = runner, place, before
        self._captures: dict[tuple[int, int, bool], Capture] = {}

    def run(self, root: int, width: int, depth: int, *, after_work: bool = False) -> None:
        """Attach ``depth`` levels of ``width`` nodes to the tree. The draft model does not run the last level.

        Args:
            root: the root's position or cache slot.
            after_work: on a GPU, the capture begins with the work ``before``.
        """
        if self._runner.recorder is not None:
            self._place.write(root)
            self.capture(width, depth, after_work=after_work)()
            return
        grow = self._runner.step("grow", width)
        for level in range(depth - 1):
            self._place.write(root, 1 + level * width)
            grow()
        self._place.write(root, 1 + (depth - 1) * width)
        self._runner.step("finish", width)()

    def capture(self, width: int, depth: int, *, after_work: bool = False) -> Capture:
        """Return one captured CUDA graph that attaches ``depth`` levels of ``width`` nodes.

        Args:
            after_work: the graph begins with the work ``before``.
        """
        found = self._captures.get((width, depth, after_work))
        if found is None:
            assert self._runner.recorder is not None
            grow, finish = self._runner.step("grow", width), self._runner.step("finish", width)
            first = self._place.tensor[1:]

            def levels() -> Sequence[Tensor]:
                if after_work and self._before is not None:
                    self._before()
                first.fill_(1)
                for _ in range(depth - 1):
                    grow()
                    first.add_(width)
                return finish()

            found = self._captures[width, depth, after_work] = self._runner.recorder.capture(levels)
        return found

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Yield every captured CUDA graph that drafts of ``depths`` levels launch, head drafts included.

        They are prepared between requests, because preparing a capture runs it once.
        """
        for name, width in self._runner.defined:
            if name == "grow":
                for depth in depths:
                    yield self.capture(width, depth)
                    if self._before is not None:
                        yield self.capture(width, depth, after_work=True)
            elif name != "finish":
                yield self._runner.captured((name, width))


class LevelDrafter(ABC):
    """Drafter that grows the token tree for which its steps were compiled.

    A schedule may run the head draft early (``head``). Otherwise ``propose`` runs it.
    """

    levels: LevelSteps

    def __init__(self, head_width: int, tree: TokenTree) -> None:
        self._head_width = head_width  # rows of the head draft as ``cost`` prices it
        self._headed: int | None = None  # committed tokens at the last head draft; None if the tree has grown since
        self._tree, self._draw_weights = tree, NOTHING_DRAWN

    def follow_draws(self, seed: int | None, temperature: float) -> None:
        """Rank candidates by the random draws that a target sampling with ``seed`` at ``temperature`` will make.

        Args:
            seed: None for a greedy target.
        """
        weights = NOTHING_DRAWN if seed is None else draft_weights(temperature)
        if weights != self._draw_weights:
            self._draw_weights = weights
            assert self._tree.draw_weights is not None
            self._tree.draw_weights.copy_(torch.tensor(weights))
        if seed is not None and self._tree.draws is not None:
            self._tree.draws[0] = draw_key(seed)

    def head(self) -> None:
        """Run the pending committed tokens, make the last one the tree's root, and add its candidates."""
        self._note_length(self._num_certain)
        self._draft_head()
        self._headed = self._num_certain

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach ``budget.depth`` levels of ``budget.width`` nodes to ``tree``, after a head draft if none has run."""
        assert budget.width is not None, "steps attach a fixed number of nodes"
        self.head_once()
        self.grow(budget.width, budget.depth)

    def head_once(self) -> None:
        """Run the head draft unless it has run for the current root; called before the tree grows."""
        if self._headed != self._num_certain:
            self.head()
        self._headed = None

    def _note_length(self, num_certain: int) -> None:
        """Note the number of committed tokens at the next root: the target's draws depend on positions."""
        if self._draw_weights is not NOTHING_DRAWN and self._tree.draws is not None:
            self._tree.draws[1] = num_certain - 1

    def cost(self, budget: Budget) -> Sequence[Step]:
        """Return the steps of a proposal with ``budget``: head, a grow step per level but the last, finish."""
        width = budget.width or 1
        levels = [Step("grow", width)] * (budget.depth - 1)
        return [Step("head", self._head_width), *levels, Step("finish", width)]

    @property
    @abstractmethod
    def _num_certain(self) -> int:
        """Return the number of committed tokens of the request."""

    @abstractmethod
    def _draft_head(self) -> None:
        """Run the steps of the head draft. Called by ``head``."""

    @property
    def root_position(self) -> int:
        """Position or cache slot of the tree's root, an input of the level steps; 0 if they do not use it."""
        return 0

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Yield the captured CUDA graphs that drafts of ``depths`` levels launch, to be prepared between requests."""
        return self.levels.captures(depths)

    def grow(self, width: int, depth: int) -> None:
        """Attach ``depth`` levels of ``width`` nodes below the root, whose candidates the head draft has added."""
        self.levels.run(self.root_position, width, depth)
