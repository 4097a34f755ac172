"""How well trees have kept what their scores promised, so that the next promise is an honest one.

Scores are products of calibrated probabilities, as if edges were independent and every text like the calibration's. On
one kind of text they promise too little, on another too much; a running ratio, kept across requests, corrects it.
"""

_MEMORY = 0.98  # of what was seen, an iteration
_PRIOR = 4.0  # tokens that count as promised and kept before anything was seen


class KeptPromises:
    """Running ratio of accepted to promised drafted tokens."""

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0

    def observe(self, promised: float, accepted: float) -> None:
        """A tree gave ``accepted`` tokens where its scores promised ``promised``, both without the bonus."""
        self._promised = _MEMORY * self._promised + promised
        self._accepted = _MEMORY * self._accepted + accepted

    def honest(self, expected: float) -> float:
        """Tokens to expect, bonus included, where the scores say ``expected``."""
        return 1.0 + max(expected - 1.0, 0.0) * (self._accepted + _PRIOR) / (self._promised + _PRIOR)
