"""Guesses that cost no pass, as an iteration's stages use them: a tree of their own, or more nodes in a drafted one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.drafters.group import DrafterGroup
from yggdrasil.drafters.protocol import Budget
from yggdrasil.engine.iteration import Iteration
from yggdrasil.engine.ranking import Ranking
from yggdrasil.engine.targets.target import Target
from yggdrasil.policy.stopping import UNBOUNDED, StoppingBound
from yggdrasil.tree.token_tree import TokenTree


class AsideTree:
    """What ``free`` guesses, in a tree of its own until it is chosen to be ``tree``'s content.

    A staged drafter may have planted the next root in ``tree`` already, which must not be lost for a look at other
    guesses. Where no drafter does that (``shares_tree``) they grow in ``tree`` itself, if that is on the host, and are
    ranked in ``order``, where one is given; what a drafter then plants takes their place.
    """

    def __init__(
        self,
        free: DrafterGroup,
        tree: TokenTree,
        verify_widths: Sequence[int],
        *,
        shares_tree: bool = False,
        order: Tensor | None = None,
    ) -> None:
        self._free, self._tree = free, tree
        self.is_in_place = shares_tree and tree.tokens.device.type == "cpu"
        self._own = tree if self.is_in_place else TokenTree.on_host(tree.num_nodes)
        self._ranking = Ranking(self._own, verify_widths, order if self.is_in_place else None)

    def grow(self, depth: int, bound: StoppingBound = UNBOUNDED) -> list[float]:
        """Guess anew; returns the tokens to expect at each verify width by the scores, bonus included.

        Widths that cannot win by ``bound`` may get less than there would be for them.
        """
        self._free.propose(self._own, Budget(depth, bound=bound))
        return self._ranking.rank()

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Nodes from best to worst."""
        return self._ranking.order

    def use(self, width: int) -> int:
        """Make it the tree of this iteration; returns the levels of its best ``width`` nodes."""
        if not self.is_in_place:
            self._tree.take_nodes(self._own)
        return self._ranking.depth(width)


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
