"""What a policy may ask of the iteration that is under way."""

from torch import Tensor

from yggdrasil.engine.target import Target
from yggdrasil.predictor.evidence import Float32Array, Repetition
from yggdrasil.tree.token_tree import TokenTree


class LiveEvidence:
    """Evidence of one request; every part is read when it is asked for.

    ``text`` is the request's certain tokens, prompt included; whoever decodes appends to it and sets ``state``.
    """

    def __init__(self, target: Target, tree: TokenTree, text: list[int], state: Tensor) -> None:
        self._target, self._tree, self.text, self.state = target, tree, text, state
        self._repetition, self._num_read = Repetition(), 0

    @property
    def context(self) -> int:
        return self._target.length

    def hidden(self) -> Float32Array:
        values: Float32Array = self.state.cpu().numpy()
        return values

    def repetition(self) -> Float32Array:
        self._repetition.extend(self.text[self._num_read :])
        self._num_read = len(self.text)
        return self._repetition.figures()

    def head(self) -> Float32Array:
        values: Float32Array = self._tree.root_guesses().numpy()
        return values
