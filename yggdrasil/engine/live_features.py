"""What a policy may ask of the iteration that is under way."""

import numpy as np

from yggdrasil.engine.targets.target import Outcome, Target
from yggdrasil.predictor.features import Float32Array
from yggdrasil.runtime.buffers import HostView
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree


class LiveFeatures:
    """Features of one request; every part is read when it is asked for.

    ``text`` is the request's certain tokens, prompt included; whoever decodes appends to it and sets ``outcome``.
    """

    def __init__(self, target: Target, tree: TokenTree, text: list[int], outcome: Outcome) -> None:
        self._target, self.text, self.outcome = target, text, outcome
        root = slice(tree.candidates)
        self._root_scores, self._root_edges = HostView(tree.pool_scores[root]), HostView(tree.pool_edges[root])
        self._figures = target.figures
        self._num_read = self._figures.resume(text)

    @property
    def context(self) -> int:
        return self._target.length

    def hidden(self) -> Float32Array:
        values: Float32Array = self.outcome.hidden.numpy(force=True)
        return values

    def repetition(self) -> Float32Array:
        self._figures.extend(self.text[self._num_read :])
        self._num_read = len(self.text)
        return self._figures.read()

    def head(self) -> Float32Array:
        """What ``TokenTree.root_guesses`` reads, from views made once."""
        return np.where(np.isfinite(self._root_scores.read()), self._root_edges.read(), np.float32(NO_SCORE))
