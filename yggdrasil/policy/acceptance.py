"""Calibration of acceptance estimates, followed online: what the last trees had accepted beside what was estimated.

Scores are products of calibrated probabilities, as if edges were independent and every text like the calibration's. On
one kind of text they estimate too little, on another too much; a correction factor, kept across requests, follows it.
Both sides of it are moving averages that begin with a few tokens in which the estimate was right.

Dims: D depth levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DECAY = 0.98  # of the moving averages, an iteration
PRIOR = 4.0  # tokens, or trees, in which the estimate was right before any was seen
_TINY = 1e-9  # nothing is divided by zero


class AcceptanceCorrection:
    """Correction factor of the tokens that the scores of a tree expect."""

    def __init__(self) -> None:
        self._estimated = self._accepted = 0.0
        self.factor = 1.0

    def observe(self, estimated: float, accepted: float) -> None:
        """A tree had ``accepted`` tokens accepted where its scores expected ``estimated``, both without the bonus."""
        self._estimated = DECAY * self._estimated + estimated
        self._accepted = DECAY * self._accepted + accepted
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)

    def decay(self) -> None:
        """An iteration without such a tree: in the end the scores are taken as they are."""
        self.observe(0.0, 0.0)

    def corrected(self, tokens: float) -> float:
        """Return the tokens to expect, bonus included, where the scores say ``tokens``."""
        return 1.0 + max(tokens - 1.0, 0.0) * self.factor

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        return {"estimated": self._estimated, "accepted": self._accepted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self._estimated, self._accepted = state["estimated"], state["accepted"]
        self.factor = (self._accepted + PRIOR) / (self._estimated + PRIOR)


class SurvivalCorrection:
    """Correction factor of the survival of each level of a drafter's trees.

    Plain lists hold the averages: they change in every iteration, and a pass waits for it.
    """

    def __init__(self, max_depth: int) -> None:
        self._estimated, self._accepted = [0.0] * max_depth, [0.0] * max_depth

    def observe(self, estimated: Sequence[float], accepted: int) -> None:
        """A tree whose levels were estimated to survive with ``estimated`` [<= D] had ``accepted`` tokens accepted."""
        self.decay()
        for level, share in enumerate(estimated):
            self._estimated[level] += share
            self._accepted[level] += level < accepted

    def decay(self) -> None:
        """An iteration without such a tree: in the end the estimates are taken as they are."""
        self._estimated = [DECAY * share for share in self._estimated]
        self._accepted = [DECAY * share for share in self._accepted]

    def corrected(self, survival: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """Return the survival [D] to expect where ``survival`` [D] is estimated; it never rises with the level."""
        prior = PRIOR * survival
        kept: npt.NDArray[np.float64] = survival * (self._accepted + prior) / (self._estimated + prior + _TINY)
        return np.minimum.accumulate(np.minimum(kept, 1.0))

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        return {"estimated": list(self._estimated), "accepted": list(self._accepted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self._estimated, self._accepted = list(state["estimated"]), list(state["accepted"])
