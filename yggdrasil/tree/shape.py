"""The shape of an iteration's tree: draft width, depth, verify width."""

from typing import NamedTuple


class TreeShape(NamedTuple):
    """Shape of the tree that one iteration drafts and verifies.

    ``width`` is the number of nodes attached per draft step, ``depth`` the number of draft steps, ``verify_width`` the
    number of nodes verified, root included. Depth 0 is a plain step (``PLAIN_STEP``). Width 0 with a depth above 0 is a
    tree of model-free drafts with at most ``depth`` levels, without draft steps.
    """

    width: int
    depth: int
    verify_width: int

    @property
    def is_model_free(self) -> bool:
        """Whether a tree of this shape has only model-free drafts; False for a plain step."""
        return self.width == 0 and self.depth > 0


PLAIN_STEP = TreeShape(width=0, depth=0, verify_width=1)
