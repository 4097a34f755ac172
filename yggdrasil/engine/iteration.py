"""The state of an iteration, the choice of the tree shape to draft and verify, and model-free drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.drafters.protocol import Budget, DrafterGroup, ungrouped
from yggdrasil.engine.targets.target import Outcome, Target
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.policy.objective import UNBOUNDED, Decision, ModelFree, StoppingBound
from yggdrasil.policy.policy import Policy
from yggdrasil.predictor.features import Float32Array
from yggdrasil.runtime.buffers import HostView
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import NO_SCORE, Ranking, TokenTree

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


class ShadowTree:
    """A tree of model-free drafts, copied to ``tree`` if the policy chooses it.

    With ahead-of-time head drafts, ``tree`` may have the next root already, which must not be overwritten. Otherwise
    (``shares_tree``), if ``tree`` is on the host, the drafts grow in ``tree`` itself and are ranked in ``order``, if
    given. The drafter's next root then overwrites them.
    """

    def __init__(
        self,
        model_free: DrafterGroup,
        tree: TokenTree,
        verify_widths: Sequence[int],
        *,
        shares_tree: bool = False,
        order: Tensor | None = None,
    ) -> None:
        self._free, self._tree = ungrouped(model_free), tree
        self.is_in_place = shares_tree and tree.tokens.device.type == "cpu"
        self._own = tree if self.is_in_place else TokenTree.on_host(tree.num_nodes)
        self._ranking = Ranking(self._own, verify_widths, order if self.is_in_place else None)

    def grow(self, depth: int, bound: StoppingBound = UNBOUNDED) -> list[float]:
        """Grow a new tree, and return its expected tokens at each verify width, bonus included.

        Growth stops when ``bound`` shows that no wider pass can have a higher objective value.
        """
        self._free.propose(self._own, Budget(depth, bound=bound))
        return self._ranking.rank()

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Return the nodes from best to worst, [N] int64."""
        return self._ranking.order

    def use(self, width: int) -> int:
        """Use this tree in the iteration. Return the number of levels of its best ``width`` nodes."""
        if not self.is_in_place:
            self._tree.take_nodes(self._own)
        return self._ranking.depth(width)


class ModelFreeDrafts:
    """Model-free drafters of an engine. ``shares_tree`` is as for ``ShadowTree``.

    ``alone`` is the tree that has only model-free drafts.
    """

    def __init__(
        self,
        model_free: DrafterGroup,
        target: Target,
        tree: TokenTree,
        verify_widths: Sequence[int],
        *,
        shares_tree: bool,
    ) -> None:
        self.name = model_free.name
        order = None if target.ranks_nodes else target.order
        self.alone = ShadowTree(model_free, tree, verify_widths, shares_tree=shares_tree, order=order)
        # Trees on a GPU, or ranked there, cannot be extended by the host.
        self.can_fill = tree.tokens.device.type == "cpu" and not target.ranks_nodes
        self._free, self._tree = ungrouped(model_free), tree

    def fill(self, depth: int, bound: StoppingBound) -> None:
        """Add nodes to the drafted tree, down to ``depth`` levels, until ``bound`` stops growth."""
        self._free.propose(self._tree, Budget(depth, bound=bound, from_root=False))

    def extend(self, tokens: Sequence[int]) -> None:
        """Pass the accepted tokens to the drafters."""
        self._free.extend(tokens, {})


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
