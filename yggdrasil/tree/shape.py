"""The shape of an iteration's tree: draft width, depth, verify width."""

from typing import NamedTuple


class TreeShape(NamedTuple):
    """Shape of the tree that one iteration drafts and verifies.

    Depth 0 is a plain step (``PLAIN_STEP``). Width 0 with a depth is a tree of model-free drafts, which no pass drafts.
    """

    width: int
    depth: int
    verify_width: int

    @property
    def is_free(self) -> bool:
        """Whether the tree holds model-free drafts alone."""
        return self.width == 0 and self.depth > 0


PLAIN_STEP = TreeShape(width=0, depth=0, verify_width=1)
