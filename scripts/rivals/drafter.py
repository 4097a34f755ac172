"""A draft model that grows the trees of other systems with its own compiled steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from rivals.protocol import Entries, Growth, Pool
from rivals.steps import ChosenLeavesStep, ChosenStep
from yggdrasil.drafters.draft_model import DraftModel
from yggdrasil.drafters.protocol import Budget, Step
from yggdrasil.runtime.passes import HostBuffer, fitting
from yggdrasil.tree.token_tree import TokenTree


class ChosenDrafter:
    """Grows ``tree`` by the rule ``growth``, which may be replaced between requests; None grows Equal-Growth Trees.

    Everything else is the draft model's. A level wider than the widest step is attached in several steps, and the tree
    needs room for the widest step after its last node. A rule uses only the ``depth`` of a budget.
    """

    def __init__(
        self, drafter: DraftModel, tree: TokenTree, widths: Sequence[int], growth: Growth | None = None
    ) -> None:
        self.name = f"{drafter.name}, by rule"
        self.growth = growth
        self._drafter = drafter
        assert drafter.capabilities.steps is not None
        steps = replace(drafter.capabilities.steps, tail=None)
        self.capabilities = replace(drafter.capabilities, steps=steps)
        self._widths = sorted(widths)
        runner = drafter.runner
        device = runner.loaded.device
        self._place = HostBuffer(3, device)
        self._entries = HostBuffer(self._widths[-1], device)
        for width in self._widths:
            inputs = [self._place.tensor, self._entries.tensor[:width]]
            buffers = tree.tensors()
            runner.define("chosen", width, ChosenStep(runner.call), [*inputs, drafter.knots, *buffers])
            runner.define("chosen_leaves", width, ChosenLeavesStep(), [*inputs, *buffers])
        runner.complete_again()

    def begin(self, tokens: Sequence[int]) -> None:
        self._drafter.begin(tokens)

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self._drafter.extend(tokens, states)

    def cost(self, budget: Budget) -> Sequence[Step]:
        return self._drafter.cost(budget)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        growth = self.growth
        if growth is None:
            self._drafter.propose(tree, budget)
            return
        self._drafter.head_once()
        depth = budget.depth
        pool = _look(tree)
        newest, size = range(1), 1
        for level in range(1, depth):
            entries = growth.level(pool, newest, level)
            if not len(entries):
                return
            newest = range(size, size + len(entries))
            size = self._attach("chosen", tree, size, entries)
            pool = _look(tree) if growth.reads_pool else pool
        self._attach("chosen_leaves", tree, size, growth.last(pool, newest, depth))

    def _attach(self, step: str, tree: TokenTree, size: int, entries: Entries) -> int:
        """Attach ``entries`` to a tree of ``size`` nodes, and return its new size."""
        widest = self._widths[-1]
        chosen = entries.tolist()
        for start in range(0, len(chosen), widest):
            part = chosen[start : start + widest]
            width = fitting(self._widths, len(part))
            assert size + width <= tree.num_nodes, f"{size} + {width} nodes in a tree that holds {tree.num_nodes}"
            self._place.write(self._drafter.root_position, size, len(part))
            self._entries.write(*part, *[part[-1]] * (width - len(part)))
            self._drafter.runner.launch((step, width))
            size += len(part)
        return size


def _look(tree: TokenTree) -> Pool:
    """Return the candidate pool on the host; on a CPU its arrays are views."""
    return Pool(tree.pool_scores.cpu().numpy(), tree.pool_edges.cpu().numpy(), tree.candidates)
