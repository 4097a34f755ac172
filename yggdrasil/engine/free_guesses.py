"""Guesses that cost no pass, as an iteration's stages use them: a tree of their own, or more nodes in a drafted one."""

from collections.abc import Sequence

from yggdrasil.drafters.protocol import FreeDrafter, ReadingDrafter, ThriftyDrafter, each_of, recyclers
from yggdrasil.engine.aside import AsideTree
from yggdrasil.engine.iteration import Iteration
from yggdrasil.engine.target import Target
from yggdrasil.tree.stakes import Stakes
from yggdrasil.tree.token_tree import TokenTree


class FreeGuesses:
    """Those of ``free`` beside ``tree``, which another drafter may have grown, or planted already (``shares_tree``).

    ``alone`` is the tree that they make by themselves.
    """

    def __init__(
        self, free: FreeDrafter, target: Target, tree: TokenTree, verify_widths: Sequence[int], *, shares_tree: bool
    ) -> None:
        self.name = free.name
        order = None if target.ranks_nodes else target.order
        self.alone = AsideTree(free, tree, verify_widths, shares_tree=shares_tree, order=order)
        # A tree that lies elsewhere, or is ranked there, is fixed before the host could add to it.
        self.can_fill = tree.tokens.device.type == "cpu" and not target.ranks_nodes
        self._free, self._target, self._tree = free, target, tree
        self._thrifty = free if isinstance(free, ThriftyDrafter) else None
        self._readers = [each for each in each_of(free) if isinstance(each, ReadingDrafter)]
        self._recyclers = recyclers(free)

    def fill(self, depth: int, stakes: Stakes) -> None:
        """Add to the drafted tree what costs no pass, as far as it may be verified."""
        if self._thrifty is None:
            self._free.fill(self._tree, depth)
        else:
            self._thrifty.fill_for(self._tree, depth, stakes)

    def follow(self, state: Iteration) -> None:
        """Learn what the iteration made certain, and what its pass said of other rows."""
        outcome = state.outcome
        assert outcome is not None
        if self._readers and state.verifies_tree:
            nodes, choices = self._target.guesses(state.outputs, state.shape.verify_width)
            for reader in self._readers:
                reader.read(self._tree, nodes.tolist(), choices.tolist())
        self._free.extend(outcome.tokens, {})
        if outcome.seen is not None:
            for drafter in self._recyclers:
                drafter.recycle(*outcome.seen)
