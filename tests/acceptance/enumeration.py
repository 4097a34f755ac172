"""The exact law of a random program: run it once for every sequence of outcomes of its coins."""

from collections import Counter
from collections.abc import Callable, Hashable

import numpy as np
import torch

from yggdrasil.acceptance.coins import Choice
from yggdrasil.acceptance.sampling import SamplingParams


class Scripted:
    """Coins that follow a script, then take the first outcome everywhere and note the others for later runs."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self._script = script
        self._taken: list[int] = []
        self.probability = 1.0
        self.others: list[tuple[int, ...]] = []

    def at(self, position: int, purpose: str) -> "Scripted":
        return self

    def choose(self, logits: torch.Tensor, params: SamplingParams, position: int) -> None:
        """Leave every choice to ``draw``."""

    def draw(self, scores: np.ndarray) -> Choice:
        law = np.exp(scores - scores.max())
        return Choice(self._outcome(law / law.sum()), float("inf"))

    def flip(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return bool(self._outcome(np.array([1 - probability, probability])))

    def _outcome(self, law: np.ndarray) -> int:
        possible = np.flatnonzero(law > 0).tolist()
        place = len(self._taken)
        if place < len(self._script):
            outcome = self._script[place]
        else:
            outcome = possible[0]
            self.others += [(*self._taken, other) for other in possible[1:]]
        self._taken.append(outcome)
        self.probability *= law[outcome]
        return outcome


def exact_law(program: Callable[[Scripted], Hashable]) -> Counter[Hashable]:
    """Probability of every result of ``program``, which takes all its randomness from the coins it is given."""
    law: Counter[Hashable] = Counter()
    pending: list[tuple[int, ...]] = [()]
    while pending:
        coins = Scripted(pending.pop())
        law[program(coins)] += coins.probability
        pending += coins.others
    return law


def distance(left: Counter[Hashable], right: Counter[Hashable]) -> float:
    """Total variation distance."""
    return sum(abs(left[key] - right[key]) for key in left.keys() | right.keys()) / 2
