"""How well trees have kept what was promised of them, in tokens and in time, so that the next promise is honest.

Scores are products of calibrated probabilities, as if edges were independent and every text like the calibration's. On
one kind of text they promise too little, on another too much; a running ratio, kept across requests, corrects it.
Costs were measured on a machine whose speed changes, with caches as warm as a calibration keeps them; so are they.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.engine.budget import Budget

_MEMORY = 0.98  # of what was seen, an iteration
_TINY = 1e-9  # survival that nothing is divided by
_PRIOR = 4.0  # tokens that count as promised and kept before anything was seen


class KeptPromises:
    """Running ratio of accepted to promised drafted tokens."""

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0
        self.kept = 1.0  # the ratio

    def observe(self, promised: float, accepted: float) -> None:
        """A tree gave ``accepted`` tokens where its scores promised ``promised``, both without the bonus."""
        self._promised = _MEMORY * self._promised + promised
        self._accepted = _MEMORY * self._accepted + accepted
        self.kept = (self._accepted + _PRIOR) / (self._promised + _PRIOR)

    def forget(self) -> None:
        """Time has passed: what was seen before counts a little less."""
        self._promised *= _MEMORY
        self._accepted *= _MEMORY
        self.kept = (self._accepted + _PRIOR) / (self._promised + _PRIOR)

    def honest(self, expected: Sequence[float]) -> list[float]:
        """Tokens to expect, bonus included, wherever the scores say ``expected``."""
        return [1.0 + max(tokens - 1.0, 0.0) * self.kept for tokens in expected]


class KeptLift:
    """What a drafter adds to other guesses, by what it has added where it was preferred to them.

    That is where the others promise little. What trees keep there says little of other places, and less still of what
    the drafter adds; so that is compared with what it was to add where it was tried.
    """

    _MEMORY = 0.995  # of what was seen, an iteration: what one adds says little
    _PRIOR = 40.0  # tokens that count as promised and kept before anything was seen: those of a hundred trees

    def __init__(self) -> None:
        self._promised = self._added = 0.0

    @property
    def kept(self) -> float:
        """The ratio."""
        return max(0.0, (self._added + self._PRIOR) / (self._promised + self._PRIOR))

    def observe(self, promised: float, added: float) -> None:
        """A tree gave ``added`` tokens more than the other guesses would have, where ``promised`` were expected."""
        self.forget()
        self._promised += promised
        self._added += added

    def forget(self) -> None:
        """An iteration passed: what is not tried any more is believed as calibrated, in the end."""
        self._promised *= self._MEMORY
        self._added *= self._MEMORY


class KeptSurvival:
    """Running ratio of kept to promised survival at each level.

    What the calibration's text and setting gave, this text and this setting may not, and the less the deeper.
    What is done in every iteration is done with few numbers, which are no arrays: a pass waits for it.

    Dims: D depth levels.
    """

    _PRIOR_TREES = 4.0  # count as promised and kept before anything was seen

    def __init__(self, max_depth: int) -> None:
        self._promised = [0.0] * max_depth
        self._kept = [0.0] * max_depth

    def observe(self, promised: Sequence[float], accepted: int) -> None:
        """A tree whose levels promised to survive with ``promised`` [depth] gave ``accepted`` tokens."""
        self.forget()
        for level, share in enumerate(promised):
            self._promised[level] += share
            self._kept[level] += level < accepted

    def honest(self, survival: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """Survival [D] to expect wherever the calibration says ``survival`` [D]; it never rises with the level."""
        prior = self._PRIOR_TREES * survival
        kept: npt.NDArray[np.float64] = survival * (self._kept + prior) / (self._promised + prior + _TINY)
        return np.minimum.accumulate(np.minimum(kept, 1.0))

    def forget(self) -> None:
        """An iteration passed: what is not tried any more is believed as calibrated, in the end."""
        self._promised = [_MEMORY * share for share in self._promised]
        self._kept = [_MEMORY * share for share in self._kept]


class Paces:
    """How slow plain steps, trees and free trees are now: factors on the plan's costs, followed step by step.

    They are kept apart: beside a tree, plain steps are few and meet other caches.
    """

    _PLAIN_RATE, _TREE_RATE = 0.2, 0.1
    _SHARED = 0.5  # of what a free tree shows, the machine's: it is a pass of the target and little else
    _FORGETTING = 0.01  # of what was shown, a step of another kind: what is not tried goes at the pace of that
    _EXTREME = 3.0  # a step beyond it is the machine's pause, not its pace
    _FARTHEST = 10.0  # that the machine of now may be from the calibrated one

    def __init__(self) -> None:
        self.plain = self.tree = self.free = 1.0
        self._is_known = False  # how fast the machine is at all

    def scale(self, plain: float, trees: float) -> None:
        """The machine is so many times slower than it was; nothing is said of one way beside the others."""
        self.plain *= plain
        self.tree *= trees
        self.free *= trees

    def follow_plain(self, promised_ms: float, milliseconds: float, *, is_cold: bool = False) -> None:
        """A plain step, promised at the pace of now, took ``milliseconds``.

        ``is_cold``: it came right behind a prefill, whose buffers fill the caches: no plain step is slower than that.
        The first one that is not tells how fast the machine is, and sets all paces.
        """
        surprise = self._surprise(promised_ms, milliseconds)
        if not self._is_known and not is_cold:  # other work may keep the machine busy, or the plan is another's
            self._is_known = True
            factor = min(max(milliseconds / promised_ms, 1 / self._FARTHEST), self._FARTHEST)
            self.plain, self.tree, self.free = self.plain * factor, self.tree * factor, self.free * factor
            return
        self.plain *= 1.0 + self._PLAIN_RATE * (min(surprise, 0.0) if is_cold else surprise)
        self.tree += self._FORGETTING * (self.plain - self.tree)
        self.free += self._FORGETTING * (self.plain - self.free)

    def follow_tree(self, promised_ms: float, milliseconds: float) -> None:
        """An iteration with a tree, promised at the pace of now, took ``milliseconds``."""
        self.tree *= 1.0 + self._TREE_RATE * self._surprise(promised_ms, milliseconds)
        self.free += self._FORGETTING * (self.tree - self.free)

    def follow_free(self, promised_ms: float, milliseconds: float) -> None:
        """An iteration with guesses that cost no pass took ``milliseconds``.

        Trees that were drafted while the machine was slow would never be tried again, if they kept the pace of then.
        """
        drift = self._TREE_RATE * self._surprise(promised_ms, milliseconds)
        self.free *= 1.0 + drift
        self.tree *= 1.0 + self._SHARED * drift
        self.tree += self._FORGETTING * (self.free - self.tree)

    def _surprise(self, promised_ms: float, milliseconds: float) -> float:
        return min(max(milliseconds / promised_ms, 1 / self._EXTREME), self._EXTREME) - 1.0


class PlainSamples:
    """When to take plain steps for their price: where they cost the run no more than a budget earned since the last."""

    _PRIOR_STEPS = 8.0  # that the run's rate begins with
    STEPS = 2  # of a sample: the first behind a prefill is cold

    def __init__(self, plain_ms: float) -> None:
        self._tokens, self._ms = self._PRIOR_STEPS, self._PRIOR_STEPS * plain_ms
        self._waited = inf  # iterations

    def add(self, tokens: int, milliseconds: float) -> None:
        """An iteration."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._ms = _MEMORY * self._ms + milliseconds
        self._waited += 1

    def taken(self) -> None:
        """A warm plain step has shown its price."""
        self._waited = 0

    def is_due(self, step: int, plain_ms: float) -> bool:
        """Whether ``step`` of a request is to be plain, at about ``plain_ms``."""
        if step >= self.STEPS:
            return False
        regret = self._tokens / self._ms * plain_ms - 1.0
        return self.STEPS * regret <= Budget.EARNED * self._waited
