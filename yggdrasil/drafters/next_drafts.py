"""Drafts of the next iteration, launched before the host knows what the target accepts.

On the device, the drafter reads the accepted tokens, and a head also reads their hidden states, while the host reads
the pass's result. With model-free drafters the tree is also copied to the host, which waits once for result and tree,
extends the tree and writes it back.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from yggdrasil.drafters.level_drafter import LevelDrafter
from yggdrasil.drafters.passed_rows import PassedRows
from yggdrasil.drafters.protocol import Budget
from yggdrasil.runtime.graphs import Capture, Recorder
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.tree.host_tree import HostTree
from yggdrasil.tree.token_tree import TokenTree


class NextDrafts:
    """Launcher of the next iteration's drafts: head draft, levels and the copy to the host in one CUDA graph.

    Args:
        drafter: draft model or head, whose steps are captured.
        target: the model whose passes the drafts follow.
        tree: the tree that the drafter grows.
        most: the largest number of rows of a target pass.
        copies: copy drafted trees to ``host``, which is None otherwise.
    """

    def __init__(
        self,
        drafter: LevelDrafter,
        target: LoadedModel,
        tree: TokenTree,
        recorder: Recorder,
        most: int,
        *,
        copies: bool = True,
    ) -> None:
        self.host = HostTree(tree, recorder) if copies else None
        self._drafter, self._recorder = drafter, recorder
        num_layers = len(drafter.capabilities.layers)
        self._passed = PassedRows(most, drafter.most_read, num_layers, target.hidden_size, target.dtype, target.device)
        self._captures: dict[tuple[int, int], Capture] = {}

    def serves(self, drafter: object) -> bool:
        """Return whether ``drafter`` is the constructor's drafter itself, not a wrapper, which may grow other trees."""
        return drafter is self._drafter

    @property
    def can_launch(self) -> bool:
        """Whether the drafter has read all tokens that the host knows, so that only tokens of a pass are unread."""
        return self._drafter.is_current

    def launch(self, outputs: Sequence[Tensor], rows: int, budget: Budget) -> None:
        """Launch drafts below the tokens that a launched pass commits, and the tree's copy to ``host`` if not None.

        The drafter's next ``extend`` gets these tokens. If ``extend`` gets more tokens than a head draft reads, or if
        the next tree has another budget, the drafts are not used.

        Args:
            outputs: the pass's outputs on the device, as ``CapturedTarget.verify`` returns them.
            rows: number of rows of the pass.
            budget: depth and width of the tree to draft; its width must not be None.
        """
        assert budget.width is not None
        self._passed.write(outputs, rows, self._drafter.num_certain)
        self._capture(budget.width, budget.depth)()
        if self.host is not None:
            self.host.note_copy()
        self._drafter.note_next(budget)

    def has_grown(self, budget: Budget) -> bool:
        """Return whether ``launch`` has drafted the tree of ``budget`` below the root, and copied it to ``host``."""
        return self._drafter.has_grown(budget)

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Yield the CUDA graphs of drafts of each of ``depths`` draft steps, and of copies without drafts.

        Each graph must be prepared (run once) between requests.
        """
        if self.host is not None:
            yield from self.host.captures()
        for name, width in self._drafter.runner.defined:
            if name == "grow":
                yield from (self._capture(width, depth) for depth in depths)

    def _capture(self, width: int, depth: int) -> Capture:
        found = self._captures.get((width, depth))
        if found is None:
            draft = self._drafter.next_work(self._passed, width, depth)

            def run() -> Sequence[Tensor]:
                outputs = draft()
                return outputs if self.host is None else self.host.copy()

            found = self._captures[width, depth] = self._recorder.capture(run)
        return found
