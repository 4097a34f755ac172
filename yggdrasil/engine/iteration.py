"""The state of one iteration, and the choice of the tree shape that it drafts and verifies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from yggdrasil.drafters.protocol import Budget, DrafterGroup, ungrouped
from yggdrasil.engine.targets.logit_target import Target
from yggdrasil.engine.targets.target import Outcome
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.policy.fixed import Policy
from yggdrasil.policy.objective import Decision, ModelFree
from yggdrasil.predictor.features import Float32Array
from yggdrasil.runtime.passes import HostCopies
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.host_tree import HostTree
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import NO_SCORE, Ranking, TokenTree

NO_TREE = Decision(PLAIN_STEP)  # the decision if there is no room for a tree, or no drafter


class Emission(NamedTuple):
    """The tokens that an iteration committed, with its tree shape and the policy's decision."""

    tokens: Sequence[int]
    shape: TreeShape
    decision: Decision


@dataclass(slots=True)
class Iteration:
    """State of one iteration of the decode loop. Values for the next iteration have separate fields."""

    root: int  # last committed token
    decision: Decision | None = None  # of the policy; None until it has the features that it needs
    shape: TreeShape = PLAIN_STEP
    is_decided: bool = False  # whether the shape is final before any stage runs
    is_on_host: bool = False  # whether the host has grown or extended a tree that captured steps verify
    previous: Emission | None = None  # tokens that are not detokenised yet
    ranking: npt.NDArray[np.int64] | None = None  # [N], nodes from best to worst
    outputs: Sequence[Tensor] = ()  # of the stage "verify", for "accept"
    outcome: Outcome | None = None  # accepted tokens, once known
    emission: Emission | None = None  # what this iteration has committed
    watched: TokenTree | None = None  # a copy of the verified tree, if the next one is drafted before ``commit``
    next_decision: Decision | None = None  # for the next iteration, if the schedule decides one ahead

    @property
    def drafts(self) -> bool:
        """Whether the drafter grows a tree in this iteration; False for a tree of model-free drafts alone."""
        return self.shape.width > 0 and self.shape.depth > 0

    @property
    def verifies_tree(self) -> bool:
        """Whether the target verifies drafted nodes, so that its pass has more rows than the root's."""
        return self.shape.verify_width > 1

    @property
    def verifies_drafts(self) -> bool:
        """Whether the target verifies nodes of a tree that the drafter has grown, not of model-free drafts alone."""
        return self.verifies_tree and self.shape.width > 0

    @property
    def accepted_drafts(self) -> list[int]:
        """Indices of the accepted nodes that the drafter attached, from the root down, without the root.

        Accepted model-free nodes, which are deeper, are left out. The iteration must have an outcome.
        """
        assert self.outcome is not None
        end = 1 + self.shape.width * self.shape.depth
        return [node for node in self.outcome.nodes[1:] if node < end]

    def following(self) -> "Iteration":
        """Return the state with which the next iteration starts. This iteration must have an outcome."""
        assert self.outcome is not None
        return Iteration(self.outcome.tokens[-1], self.next_decision, previous=self.emission)


class ShadowTree:
    """A tree of model-free drafts, grown before the policy decides whether to verify it.

    The drafts grow in a separate tree, because ``tree`` may already hold the next root if head drafts run ahead of
    acceptance. If the policy chooses the drafts, ``use`` copies them to ``tree``. With ``host``, the separate tree is
    the copy of ``tree`` in pinned memory. If ``host`` is None, ``shares_tree`` is True and ``tree`` is on the CPU,
    there is no separate tree: the drafts grow in ``tree`` itself, and are ranked in ``order`` [N] int64.
    """

    def __init__(
        self,
        model_free: DrafterGroup,
        tree: TokenTree,
        verify_widths: Sequence[int],
        *,
        shares_tree: bool = False,
        order: Tensor | None = None,
        host: HostTree | None = None,
    ) -> None:
        self._free, self._tree, self._host = ungrouped(model_free), tree, host
        self.is_in_place = shares_tree and host is None and tree.tokens.device.type == "cpu"
        copied = TokenTree.on_host(tree.num_nodes) if host is None else host.tree
        self._own = tree if self.is_in_place else copied
        self._ranking = Ranking(self._own, verify_widths, order if self.is_in_place else None)

    def grow(self, depth: int) -> list[float]:
        """Grow a new tree of model-free drafts, of at most ``depth`` levels below the root.

        Returns:
            For each verify width, in the order given to the constructor, the expected number of tokens of its pass,
                bonus token included.
        """
        self._free.propose(self._own, Budget(depth))
        return self._ranking.rank()

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Indices of the nodes by descending score (estimated acceptance), [N] int64; the root is first.

        A parent precedes its children. Entries that hold no node come last.
        """
        return self._ranking.order

    def use(self, width: int) -> int:
        """Make this tree the one that the target verifies, and return the depth of its ``width`` best nodes."""
        if self._host is not None:
            self._host.write()
        elif not self.is_in_place:
            self._tree.take_nodes(self._own)
        return self._ranking.depth(width)


class ModelFreeDrafts:
    """The model-free drafters of an engine: they grow a tree of only their drafts (``alone``) or extend a drafted tree.

    ``shares_tree`` lets ``alone`` grow in ``tree``, see ``ShadowTree``. ``host`` has copies on the host of the trees
    that captured steps draft; without it, such a tree is not extended.
    """

    def __init__(
        self,
        model_free: DrafterGroup,
        target: Target,
        tree: TokenTree,
        verify_widths: Sequence[int],
        *,
        shares_tree: bool,
        host: HostTree | None = None,
    ) -> None:
        self.name = model_free.name
        model_free.vocab_size = target.vocab_size  # so that the trees of users' drafters are checked
        order = None if target.ranks_nodes else target.order
        self.alone = ShadowTree(
            model_free, tree, verify_widths, shares_tree=shares_tree, order=order, host=target.host_tree
        )
        # Trees on a GPU, or ranked there, cannot be extended without a copy.
        self.can_fill = host is not None or (tree.tokens.device.type == "cpu" and not target.ranks_nodes)
        self._free, self._tree = ungrouped(model_free), tree if host is None else host.tree

    def fill(self, depth: int) -> None:
        """Add model-free nodes to the drafter's tree, or to its copy, at most ``depth`` levels below the root."""
        self._free.propose(self._tree, Budget(depth, is_first=False))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the accepted token ids to the text of every model-free drafter."""
        self._free.extend(tokens, {})


class LiveFeatures:
    """Features of one request that the depth predictor reads, computed on demand.

    ``text`` has the committed tokens, prompt included, and ``outcome`` the last target pass. The decode loop updates
    both. ``copies`` copies tensors from the tree's device to the host; it is None on a CPU.
    """

    def __init__(
        self, target: Target, tree: TokenTree, text: list[int], outcome: Outcome, copies: HostCopies | None = None
    ) -> None:
        self._target, self.text, self.outcome, self._copies = target, text, outcome, copies
        root = slice(tree.candidates)
        self._root = [tree.pool_scores[root], tree.pool_edges[root]]
        self._num_read = target.figures.resume(text)

    @property
    def context(self) -> int:
        """Number of committed tokens whose KV entries are in the target's cache: all but the last one."""
        return self._target.length

    def hidden(self) -> Float32Array:
        """Return the target's hidden state from which the last committed token was chosen, [H] float32."""
        values: Float32Array = self.outcome.hidden.numpy(force=True)
        return values

    def repetition(self) -> Float32Array:
        """Return six numbers on how the end of the text repeats an earlier part of it, [6] float32."""
        figures = self._target.figures
        figures.extend(self.text[self._num_read :])
        self._num_read = len(self.text)
        return figures.read()

    def head(self) -> Float32Array:
        """Return the drafter's log-probabilities of the root's K candidates, [K] float32, -inf for absent ones.

        The head draft, which computes them, must have run.
        """
        scores, edges = self._root if self._copies is None else self._copies.read(self._root)
        return np.where(np.isfinite(scores.numpy()), edges.numpy(), np.float32(NO_SCORE))


class ShapeChoice:
    """Chooser of each iteration's tree shape: asks the policy, and limits the depth by the remaining context.

    ``max_depth`` is the most levels of a tree of only model-free drafts, ``max_length`` the context length in tokens.
    """

    _policy: Policy
    _stream: TextStream

    def __init__(
        self, target: Target, free: ModelFreeDrafts | None, max_depth: int, max_length: int, *, has_drafter: bool
    ) -> None:
        self._target, self._free, self._has_drafter = target, free, has_drafter
        self._max_depth, self._max_length = max_depth, max_length  # levels of a model-free tree; tokens of the context
        self.features: LiveFeatures
        self._predicts_late = self._keeps_books_late = False

    def use_schedule(self, schedule: Schedule) -> None:
        """Set the schedule.

        Its variants say when a shape is chosen: before its iteration, within its iteration after the head draft, or
        during the previous iteration.
        """
        self._predicts_late = schedule.variants["depth_prediction"] == "late"
        self._keeps_books_late = schedule.variants["bookkeeping"] == "overlapped"

    def begin(self, policy: Policy, stream: TextStream, features: LiveFeatures) -> Decision | None:
        """Begin a request, whose tree shapes ``policy`` chooses.

        Return the decision for its first iteration if the schedule decides one iteration ahead, else None.
        """
        self._policy, self._stream, self.features = policy, stream, features
        return self.predict() if self._predicts_late else None

    def decide(self, state: Iteration) -> None:
        """Grow the tree of model-free drafts if the policy wants one, and set the shape of ``state``.

        The method is called before the stages run. If the policy needs features of this iteration, the shape stays open
        until ``predict_depth`` sets it.
        """
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
        """Set the shape of ``state`` with the features of this iteration; do nothing if ``decide`` has set it."""
        if state.is_decided:
            return
        if state.decision is None:
            state.decision = self._ask_with_features()
        state.shape = self._fitted(state.decision)

    def predict(self) -> Decision:
        """Return the policy's decision for the next iteration, between a plain step and a drafted tree.

        A tree of only model-free drafts is not considered, because it is grown only when that iteration begins.
        """
        decision = self._ask(None)
        return self._ask_with_features() if decision is None else decision

    def expect(self, state: Iteration) -> TreeShape | None:
        """Return the shape that the next iteration likely drafts, before the outcome of this iteration is known.

        Returns None if the next iteration likely drafts no tree, or if the tree might not fit in the context after the
        tokens that this iteration accepts.
        """
        decision = state.next_decision if self._predicts_late else self._ask(None)
        if decision is None or decision.kind != "drafted":
            return None
        return decision.shape if decision.shape.depth <= self.max_tree_depth - state.shape.verify_width else None

    @property
    def max_tree_depth(self) -> int:
        """The most levels that a tree may have to fit in the remaining context with the root and the bonus token.

        Below 1 there is no room for a tree.
        """
        return self._max_length - self._target.length - 2

    def _ask(self, model_free: ModelFree | None) -> Decision | None:
        """Return the policy's decision; ``NO_TREE`` if the context is full or the decision needs a missing drafter."""
        if self.max_tree_depth < 1:
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
        depth = min(self.max_tree_depth, self._stream.remaining - waiting - 1, self._max_depth)
        if depth < 1:
            return None
        return ModelFree(self._free.alone.grow(depth), depth)

    def _fitted(self, decision: Decision) -> TreeShape:
        """Return the decision's shape, its depth limited by the remaining context."""
        shape = decision.shape
        if not self._has_drafter or self.max_tree_depth < 1:
            return PLAIN_STEP
        return shape if shape.depth <= self.max_tree_depth else shape._replace(depth=self.max_tree_depth)
