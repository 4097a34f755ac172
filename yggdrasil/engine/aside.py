"""The tree that costs no pass, grown beside the drafter's own before anything is decided."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.drafters.group import DrafterGroup
from yggdrasil.drafters.protocol import Budget
from yggdrasil.engine.ranking import Ranking
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
