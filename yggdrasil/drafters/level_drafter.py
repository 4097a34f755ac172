"""What drafters with compiled steps have in common: a head draft, then levels of a fixed number of nodes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from yggdrasil.drafters.level_steps import LevelSteps
from yggdrasil.drafters.protocol import Budget, Step
from yggdrasil.tree.token_tree import TokenTree


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
        """What ``head`` does."""

    @property
    def root_position(self) -> int:
        """What the level steps take as the root's position or slot; 0 where they read none."""
        return 0

    def grow(self, width: int, depth: int) -> None:
        """Attach ``depth`` levels of ``width`` nodes below the root, whose candidates are in the tree."""
        self.levels.run(self.root_position, width, depth)
