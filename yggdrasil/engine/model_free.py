"""Model-free drafts in an iteration: a separate tree, or further nodes of a drafted tree."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.drafters.protocol import Budget, DrafterGroup
from yggdrasil.engine.targets.target import Target
from yggdrasil.policy.objective import UNBOUNDED, StoppingBound
from yggdrasil.tree.token_tree import Ranking, TokenTree


class ShadowTree:
    """A tree of model-free drafts, copied to ``tree`` if the policy chooses it.

    With ahead-of-time head drafts, ``tree`` may have the next root already, which must not be overwritten. Otherwise
    (``shares_tree``), if ``tree`` is on the host, the drafts grow in ``tree`` itself and are ranked in ``order``, if
    given. The drafter's next root then overwrites them.
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
        """Grow a new tree, and return its expected tokens at each verify width, bonus included.

        Growth stops when ``bound`` shows that no wider pass can have a higher objective value.
        """
        self._free.propose(self._own, Budget(depth, bound=bound))
        return self._ranking.rank()

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Return the nodes from best to worst, [N] int64."""
        return self._ranking.order

    def use(self, width: int) -> int:
        """Use this tree in the iteration. Return the number of levels of its best ``width`` nodes."""
        if not self.is_in_place:
            self._tree.take_nodes(self._own)
        return self._ranking.depth(width)


class ModelFreeDrafts:
    """Model-free drafters of an engine. ``shares_tree`` is as for ``ShadowTree``.

    ``alone`` is the tree that has only model-free drafts.
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
        # Trees on a GPU, or ranked there, cannot be extended by the host.
        self.can_fill = tree.tokens.device.type == "cpu" and not target.ranks_nodes
        self._free, self._tree = model_free, tree

    def fill(self, depth: int, bound: StoppingBound) -> None:
        """Add nodes to the drafted tree, down to ``depth`` levels, until ``bound`` stops growth."""
        self._free.propose(self._tree, Budget(depth, bound=bound, from_root=False))

    def extend(self, tokens: Sequence[int]) -> None:
        """Pass the accepted tokens to the drafters."""
        self._free.extend(tokens, {})
