"""Model-free drafts in an iteration: a tree of their own, or more nodes in a drafted tree."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.drafters.protocol import Budget, DrafterGroup
from yggdrasil.engine.targets.target import Outcome, Target
from yggdrasil.policy.objective import UNBOUNDED, StoppingBound
from yggdrasil.tree.token_tree import Ranking, TokenTree


class ShadowTree:
    """Model-free drafts in a tree of their own, copied to ``tree`` where the policy chooses them.

    A drafter with staged steps may hold the next root in ``tree`` already, which must survive. Where none does
    (``shares_tree``) and ``tree`` is on the host, the drafts grow in ``tree`` itself and are ranked in ``order``, if
    given; the drafter's next root replaces them.
    """

    def __init__(
        self,
        model_free: DrafterGroup,
        tree: TokenTree,
        verify_widths: Sequence[int],
        *,
        shares_tree: bool = False,
        order: Tensor | None = None,
    ) -> None:
        self._free, self._tree = model_free, tree
        self.is_in_place = shares_tree and tree.tokens.device.type == "cpu"
        self._own = tree if self.is_in_place else TokenTree.on_host(tree.num_nodes)
        self._ranking = Ranking(self._own, verify_widths, order if self.is_in_place else None)

    def grow(self, depth: int, bound: StoppingBound = UNBOUNDED) -> list[float]:
        """Grow a new tree; returns the tokens that its scores expect at each verify width, bonus included.

        Growth stops where ``bound`` shows that no wider pass can have a higher objective value.
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


class ModelFreeDrafts:
    """Model-free drafts beside the drafter of ``tree``; ``shares_tree`` as for ``ShadowTree``.

    ``alone`` is the tree of model-free drafts only.
    """

    def __init__(
        self,
        model_free: DrafterGroup,
        target: Target,
        tree: TokenTree,
        verify_widths: Sequence[int],
        *,
        shares_tree: bool,
    ) -> None:
        self.name = model_free.name
        order = None if target.ranks_nodes else target.order
        self.alone = ShadowTree(model_free, tree, verify_widths, shares_tree=shares_tree, order=order)
        # A tree on another device, or ranked there, is fixed before the host could add to it.
        self.can_fill = tree.tokens.device.type == "cpu" and not target.ranks_nodes
        self._free, self._target, self._tree = model_free, target, tree
        self._read_choices = model_free.capabilities.read_choices
        self._read_runners_up = model_free.capabilities.read_runners_up

    def fill(self, depth: int, bound: StoppingBound) -> None:
        """Add nodes to the drafted tree, down to ``depth`` levels and as far as ``bound`` lets them be verified."""
        self._free.propose(self._tree, Budget(depth, bound=bound, from_root=False))

    def follow(self, outcome: Outcome, outputs: Sequence[Tensor], verify_width: int) -> None:
        """Read the accepted tokens, and the target's choices and runners-up at refused rows.

        ``outputs`` are those of the verification of ``verify_width`` rows; none where it is 1.
        """
        if self._read_choices is not None and verify_width > 1:
            self._read_choices(self._tree, *self._target.read_choices(outputs, verify_width))
        self._free.extend(outcome.tokens, {})
        if self._read_runners_up is not None and outcome.seen is not None:
            self._read_runners_up(*outcome.seen)
