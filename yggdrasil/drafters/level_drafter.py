"""Base of drafters with compiled steps: a head draft, then levels of a fixed number of nodes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from yggdrasil.drafters.protocol import Budget, Step
from yggdrasil.runtime.buffers import HostBuffer
from yggdrasil.runtime.graphs import Capture, Launch
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class LevelSteps:
    """Runs the level steps that ``runner`` defines.

    Args:
        place: [2] int64, which the steps read: the root's position or slot, and the number of a level's first node.
        before: work that drafts may begin with, in the same capture; None where there is none.
    """

    def __init__(self, runner: ModelRunner, place: HostBuffer, before: Launch | None = None) -> None:
        self._runner, self._place, self._before = runner, place, before
        self._captures: dict[tuple[int, int, bool], Capture] = {}

    def run(self, root: int, width: int, depth: int, *, after_work: bool = False) -> None:
        """Attach ``depth`` levels of ``width`` nodes; the nodes of the last level are not read."""
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
        """All levels as one capture; the number of the next level's first node is counted on the device."""
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
        """Every capture that drafts of ``depths`` launch, those of the other steps of the runner among them.

        To be prepared between requests, as that runs each once.
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
    """Grows the tree that its steps were defined over.

    A schedule may run the head draft early (``head``); ``propose`` runs it where the root has no candidates yet.
    """

    levels: LevelSteps

    def __init__(self, head_width: int) -> None:
        self._head_width = head_width  # rows that most head drafts read
        self._headed: int | None = None  # certain tokens when the root's candidates were put into the tree

    def head(self) -> None:
        """Read every certain token not read yet, plant the last one as root, and put its candidates into the tree."""
        self._draft_head()
        self._headed = self._num_certain

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach ``budget.width`` nodes to each of ``budget.depth`` levels."""
        assert budget.width is not None, "steps attach a fixed number of nodes"
        self.head_once()
        self.grow(budget.width, budget.depth)

    def head_once(self) -> None:
        """Run the head draft, unless it was run for this root; the tree is about to grow."""
        if self._headed != self._num_certain:
            self.head()
        self._headed = None

    def cost(self, budget: Budget) -> Sequence[Step]:
        """The nodes of the last level are attached and not read."""
        width = budget.width or 1
        levels = [Step("grow", width)] * (budget.depth - 1)
        return [Step("head", self._head_width), *levels, Step("finish", width)]

    @property
    @abstractmethod
    def _num_certain(self) -> int:
        """Certain tokens of the request."""

    @abstractmethod
    def _draft_head(self) -> None:
        """Run the head draft, for ``head``."""

    @property
    def root_position(self) -> int:
        """The root's position or slot that the level steps read; 0 where they read none."""
        return 0

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """What drafts of ``depths`` launch, to be prepared between requests."""
        return self.levels.captures(depths)

    def grow(self, width: int, depth: int) -> None:
        """Attach ``depth`` levels of ``width`` nodes below the root, whose candidates are in the tree."""
        self.levels.run(self.root_position, width, depth)
