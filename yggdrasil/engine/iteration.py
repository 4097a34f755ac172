"""The state of an iteration, and the choice of the tree shape to draft and verify."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.engine.model_free import ModelFreeDrafts
from yggdrasil.engine.targets.target import Outcome, Target
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.policy.objective import Decision, ModelFree
from yggdrasil.policy.policy import Policy
from yggdrasil.predictor.features import Float32Array
from yggdrasil.runtime.buffers import HostView
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

NO_TREE = Decision(PLAIN_STEP)  # if there is no room or no drafter


class Emission(NamedTuple):
    """The tokens that an iteration committed, with its shape and decision, for text and statistics."""

    tokens: Sequence[int]
    shape: TreeShape
    decision: Decision


@dataclass(slots=True)
class Iteration:
    """State of one iteration. Values for the next one have separate fields, because stages may run concurrently."""

    root: int  # last committed token
    decision: Decision | None = None  # of the policy; None: it needs features first
    shape: TreeShape = PLAIN_STEP
    is_decided: bool = False  # whether the shape is final before any stage runs
    previous: Emission | None = None  # tokens that are not detokenised yet
    ranking: npt.NDArray[np.int64] | None = None  # [N], nodes from best to worst
    outputs: Sequence[Tensor] = ()
    outcome: Outcome | None = None
    emission: Emission | None = None
    next_decision: Decision | None = None

    @property
    def drafts(self) -> bool:
        """Return whether the drafter grows a tree."""
        return self.shape.width > 0 and self.shape.depth > 0

    @property
    def verifies_tree(self) -> bool:
        """Return whether the target verifies more than the root."""
        return self.shape.verify_width > 1

    @property
    def verifies_drafts(self) -> bool:
        """Return whether the target verifies nodes that the drafter attached."""
        return self.verifies_tree and self.shape.width > 0

    @property
    def accepted_drafts(self) -> list[int]:
        """Return the accepted nodes that the drafter attached. Accepted model-free nodes are below them."""
        assert self.outcome is not None
        end = 1 + self.shape.width * self.shape.depth
        return [node for node in self.outcome.nodes[1:] if node < end]

    def following(self) -> "Iteration":
        """Return the initial state of the next iteration."""
        assert self.outcome is not None
        return Iteration(self.outcome.tokens[-1], self.next_decision, previous=self.emission)


class LiveFeatures:
    """Features of one request for the depth predictor, computed on demand.

    ``text`` is the list of committed tokens, prompt included. The loop appends to it and sets ``outcome``.
    """

    def __init__(self, target: Target, tree: TokenTree, text: list[int], outcome: Outcome) -> None:
        self._target, self.text, self.outcome = target, text, outcome
        root = slice(tree.candidates)
        self._root_scores, self._root_edges = HostView(tree.pool_scores[root]), HostView(tree.pool_edges[root])
        self._num_read = target.figures.resume(text)

    @property
    def context(self) -> int:
        return self._target.length

    def hidden(self) -> Float32Array:
        values: Float32Array = self.outcome.hidden.numpy(force=True)
        return values

    def repetition(self) -> Float32Array:
        figures = self._target.figures
        figures.extend(self.text[self._num_read :])
        self._num_read = len(self.text)
        return figures.read()

    def head(self) -> Float32Array:
        """Return ``TokenTree.root_guesses``, read through views that are created once."""
        return np.where(np.isfinite(self._root_scores.read()), self._root_edges.read(), np.float32(NO_SCORE))


class ShapeChoice:
    """Chooser of each iteration's shape: asks the policy and limits the depth by the remaining context."""

    _policy: Policy
    _stream: TextStream

    def __init__(
        self, target: Target, free: ModelFreeDrafts | None, max_depth: int, max_length: int, *, has_drafter: bool
    ) -> None:
        self._target, self._free, self._has_drafter = target, free, has_drafter
        self._max_depth, self._max_length = max_depth, max_length  # levels of a model-free tree; tokens of the context
        self.features: LiveFeatures
        self._predicts_late = self._keeps_books_late = False

    def use(self, schedule: Schedule) -> None:
        """Set the schedule, whose variants define when shapes are chosen."""
        self._predicts_late = schedule.variants["depth_prediction"] == "late"
        self._keeps_books_late = schedule.variants["bookkeeping"] == "overlapped"

    def begin(self, policy: Policy, stream: TextStream, features: LiveFeatures) -> Decision | None:
        """Begin a request. Return its first decision if the schedule predicts one iteration ahead, else None."""
        self._policy, self._stream, self.features = policy, stream, features
        return self.predict() if self._predicts_late else None

    def decide(self, state: Iteration) -> None:
        """Choose the shape before the stages run, or leave it to ``predict_depth`` if the policy needs features."""
        early, model_free = state.decision, self._propose_model_free(state)
        if model_free is not None or not self._predicts_late:
            state.decision = self._ask(model_free)
        decision = state.decision
        if decision is not None and decision.kind == "model_free":
            assert self._free is not None
            width, tree = decision.shape.verify_width, self._free.alone
            state.shape, state.is_decided = TreeShape(0, max(tree.use(width), 1), width), True
            state.ranking = None if tree.is_in_place else tree.order
        elif self._predicts_late:
            assert early is not None
            state.decision, state.shape, state.is_decided = early, self._fitted(early), True
        elif decision is not None and not decision.shape.depth:
            state.is_decided = True

    def predict_depth(self, state: Iteration) -> None:
        """Choose the shape with the present features unless it is decided."""
        if state.is_decided:
            return
        if state.decision is None:
            state.decision = self._ask_with_features()
        state.shape = self._fitted(state.decision)

    def predict(self) -> Decision:
        """Return the decision for the next iteration, without regard to its model-free drafts."""
        decision = self._ask(None)
        return self._ask_with_features() if decision is None else decision

    @property
    def room(self) -> int:
        """Return the levels of the deepest tree that fits in the context, after the root and with the bonus token."""
        return self._max_length - self._target.length - 2

    def _ask(self, model_free: ModelFree | None) -> Decision | None:
        """Return the policy's decision; ``NO_TREE`` if the context is full or the decision needs a missing drafter."""
        if self.room < 1:
            return NO_TREE
        decision = self._policy.choose(self._target.length, model_free)
        is_drafting = decision is None or decision.kind == "drafted"
        return NO_TREE if is_drafting and not self._has_drafter else decision

    def _ask_with_features(self) -> Decision:
        decision = self._policy.choose(self._target.length, features=self.features)
        assert decision is not None
        return decision

    def _propose_model_free(self, state: Iteration) -> ModelFree | None:
        """Grow the model-free tree; return None if the policy does not want one or it has no room."""
        if self._free is None or not self._policy.wants_model_free:
            return None
        waiting = len(state.previous.tokens) if state.previous is not None and self._keeps_books_late else 0
        depth = min(self.room, self._stream.remaining - waiting - 1, self._max_depth)
        if depth < 1:
            return None
        return ModelFree(self._free.alone.grow(depth, self._policy.bound(self._target.length)), depth)

    def _fitted(self, decision: Decision) -> TreeShape:
        """Return the decision's shape, its depth limited by the remaining context."""
        shape = decision.shape
        if not self._has_drafter or self.room < 1:
            return PLAIN_STEP
        return shape if shape.depth <= self.room else shape._replace(depth=self.room)
