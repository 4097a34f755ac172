"""What one iteration drafts and verifies."""

from typing import NamedTuple


class TreeShape(NamedTuple):
    """What one iteration drafts and verifies; ``PLAIN_STEP`` (depth 0) drafts nothing.

    Nor does a shape of width 0: its guesses cost no pass.
    """

    width: int
    depth: int
    verify_width: int

    @property
    def is_free(self) -> bool:
        """Whether it has guesses, and they cost no pass."""
        return self.width == 0 and self.depth > 0


PLAIN_STEP = TreeShape(width=0, depth=0, verify_width=1)
