"""Guesses that cost no pass, as an iteration's stages use them: a tree of their own, or more nodes in a drafted one."""

from collections.abc import Sequence

from yggdrasil.drafters.group import DrafterGroup
from yggdrasil.drafters.protocol import Budget
from yggdrasil.engine.aside import AsideTree
from yggdrasil.engine.iteration import Iteration
from yggdrasil.engine.target import Target
from yggdrasil.policy.stopping import StoppingBound
from yggdrasil.tree.token_tree import TokenTree


class FreeGuesses:
    """Those of ``free`` beside ``tree``, which another drafter may have grown, or planted already (``shares_tree``).

    ``alone`` is the tree that they make by themselves.
    """

    def __init__(
        self, free: DrafterGroup, target: Target, tree: TokenTree, verify_widths: Sequence[int], *, shares_tree: bool
    ) -> None:
        self.name = free.name
        order = None if target.ranks_nodes else target.order
        self.alone = AsideTree(free, tree, verify_widths, shares_tree=shares_tree, order=order)
        # A tree that lies elsewhere, or is ranked there, is fixed before the host could add to it.
        self.can_fill = tree.tokens.device.type == "cpu" and not target.ranks_nodes
        self._free, self._target, self._tree = free, target, tree
        self._read_choices = free.capabilities.read_choices
        self._read_runners_up = free.capabilities.read_runners_up

    def fill(self, depth: int, bound: StoppingBound) -> None:
        """Add to the drafted tree what costs no pass, as far as it may be verified."""
        self._free.propose(self._tree, Budget(depth, bound=bound, from_root=False))

    def follow(self, state: Iteration) -> None:
        """Learn what the iteration made certain, and what its pass said of other rows."""
        outcome = state.outcome
        assert outcome is not None
        if self._read_choices is not None and state.verifies_tree:
            nodes, choices = self._target.guesses(state.outputs, state.shape.verify_width)
            self._read_choices(self._tree, nodes.tolist(), choices.tolist())
        self._free.extend(outcome.tokens, {})
        if self._read_runners_up is not None and outcome.seen is not None:
            self._read_runners_up(*outcome.seen)
