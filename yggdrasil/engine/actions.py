"""The stages of an iteration: draft, prune, verify, accept, commit. A schedule orders them."""

from collections.abc import Callable, Sequence

from yggdrasil.drafters.group import DrafterGroup
from yggdrasil.drafters.protocol import Budget, Drafter, check_tree, propose_in
from yggdrasil.engine.iteration import NO_TREE, Emission, Iteration
from yggdrasil.engine.live_features import LiveFeatures
from yggdrasil.engine.model_free import ModelFreeDrafts
from yggdrasil.engine.ranking import Ranking
from yggdrasil.engine.targets.target import Outcome, Target
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import Trace, iteration_tree
from yggdrasil.policy.objective import Decision, ModelFree
from yggdrasil.policy.policy import Policy
from yggdrasil.runtime.buffers import HostView
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import TokenTree

Action = Callable[[Iteration], None]


class StageActions:
    """The stages over one target, at most one drafter and one tree; one request at a time.

    A drafter without ``TailDrafts`` reads all that was accepted in its next head draft, after acceptance.
    ``model_free`` guesses beside it, where the policy wants that: alone in its stead, or in the tree that it has grown.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tree: TokenTree,
        verify_widths: Sequence[int],
        limit: int,
        model_free: DrafterGroup | None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.max_length = limit
        self.verify_widths = list(verify_widths)
        self._steps = None if drafter is None else drafter.capabilities.steps
        self._tail = None if self._steps is None else self._steps.tail
        self._ranking, self._order = Ranking(tree, self.verify_widths), HostView(target.order)
        self._free: ModelFreeDrafts | None = None
        if model_free is not None:
            self._free = ModelFreeDrafts(model_free, target, tree, self.verify_widths, shares_tree=self._tail is None)
        # Trees of a user's drafter are checked; compiled steps attach only known tokens.
        self._is_checked = drafter is not None and self._steps is None and tree.tokens.device.type == "cpu"
        self._keeps_books_late = False
        self._keeps_rows = self._guesses = self._reads_leaves_with_head = False
        self._drafts_head_first = self._predicts_late = False
        self._policy: Policy
        self._stream: TextStream
        self._trace: Trace
        self._features: LiveFeatures

    def begin(self, policy: Policy, stream: TextStream, trace: Trace, text: list[int], first: Outcome) -> None:
        """Serve another request, whose certain ``text`` ends with what the prefill gave."""
        self._policy, self._stream, self._trace = policy, stream, trace
        self._features = LiveFeatures(self.target, self.tree, text, first)

    def follow(self, outcome: Outcome) -> None:
        """Update the features of the policy with the outcome of an iteration."""
        self._features.text.extend(outcome.tokens)
        self._features.outcome = outcome

    def of(self, schedule: Schedule) -> dict[str, Action]:
        """The actions of the schedule's stages by name; a superset's tail has none, the head draft reads it too.

        Actions of stages that an iteration does not need, as those of drafting in a plain step, do nothing in it.
        """
        tail, head = schedule.variants["tail_draft"], schedule.variants["head_draft"]
        self._keeps_books_late = schedule.variants["bookkeeping"] == "overlapped"
        self._guesses = head == "ahead"
        self._reads_leaves_with_head = self._guesses and tail == "superset"
        self._keeps_rows = self._guesses or tail != "superset"
        self._drafts_head_first = schedule.variants["depth_prediction"] == "informed"
        self._predicts_late = schedule.variants["depth_prediction"] == "late"
        bodies: dict[str, Action] = {
            "depth_prediction=now": self._predict_depth,
            "depth_prediction=informed": self._predict_depth,
            "depth_prediction=late": self._predict_next_depth,
            "head_draft=after": self._draft_head,
            "head_draft=ahead": self._guess_heads,
            "draft_steps": self._draft_steps,
            "tail_draft=conditional": self._read_accepted_leaf,
            "tail_draft=ahead": self._read_leaves,
            "prune": self._prune,
            "mask": self._hand_over_nodes,
            "verify": self._verify,
            "accept=device": self._accept,
            "accept=host": self._accept_on_host,
            "commit": self._commit,
            "bookkeeping=inline": lambda state: self.keep_books(state.emission),
            "bookkeeping=overlapped": lambda state: self.keep_books(state.previous),
        }
        return {stage.name: bodies[stage.label] for stage in schedule.stages if stage.label in bodies}

    def decide(self, state: Iteration) -> None:
        """Choose the shape before the stages run; where the policy waits for features, ``depth_prediction`` does."""
        early, model_free = state.decision, self._propose_model_free(state)
        if model_free is not None or not self._predicts_late:
            state.decision = self._ask(model_free)
        decision = state.decision
        if decision is not None and decision.kind == "model_free":
            self._use_model_free(state, decision.shape)
            state.is_decided = True
        elif self._predicts_late:
            assert early is not None
            state.decision, state.shape, state.is_decided = early, self._fitted(early), True
        elif decision is not None and not decision.shape.depth:
            state.is_decided = True

    def decide_first(self) -> Decision | None:
        """The first decision of a request, where the schedule predicts the depth one iteration ahead; else None."""
        return self._decide_early() if self._predicts_late else None

    def _decide_early(self) -> Decision:
        """The decision for the next iteration, without its model-free drafts."""
        decision = self._ask(None)
        return self._ask_with_features() if decision is None else decision

    def _ask(self, model_free: ModelFree | None) -> Decision | None:
        """The policy's decision; a plain step where there is no room for a tree, or no drafter for what it wants."""
        if self._room < 1:
            return NO_TREE
        decision = self._policy.choose(self.target.length, model_free)
        is_drafting = decision is None or decision.kind == "drafted"
        return NO_TREE if is_drafting and self.drafter is None else decision

    def _ask_with_features(self) -> Decision:
        decision = self._policy.choose(self.target.length, features=self._features)
        assert decision is not None
        return decision

    def _propose_model_free(self, state: Iteration) -> ModelFree | None:
        """Grow the model-free tree, where the policy wants one and there is room for it."""
        if self._free is None or not self._policy.wants_model_free:
            return None
        length = self.target.text.num_rows
        waiting = len(state.previous.tokens) if state.previous is not None and self._keeps_books_late else 0
        depth = min(self.max_length - length - 2, self._stream.remaining - waiting - 1, self.verify_widths[-1] - 1)
        if depth < 1:
            return None
        return ModelFree(self._free.alone.grow(depth, self._policy.bound(length)), depth)

    def _use_model_free(self, state: Iteration, shape: TreeShape) -> None:
        assert self._free is not None
        alone, width = self._free.alone, shape.verify_width
        state.shape = TreeShape(0, max(alone.use(width), 1), width)
        if not alone.is_in_place:
            state.ranking = alone.order

    def _fitted(self, decision: Decision) -> TreeShape:
        """The decided shape within the context that is left."""
        shape = decision.shape
        if self.drafter is None or self._room < 1:
            return PLAIN_STEP
        return shape if shape.depth <= self._room else shape._replace(depth=self._room)

    @property
    def _room(self) -> int:
        """The deepest tree that fits: the text is the cache and the root, and a full path adds the bonus token too."""
        return self.max_length - self.target.length - 2

    def keep_books(self, emission: Emission | None) -> None:
        """Decode the text of the tokens, look for the end of the text, and count the iteration."""
        if emission is not None:
            tokens, shape, decision = emission
            self._trace.note(shape, self._stream.push(tokens), decision.tokens, decision.milliseconds)

    # ==== drafting ====

    def _predict_depth(self, state: Iteration) -> None:
        if state.is_decided:
            return
        if state.decision is None:
            state.decision = self._ask_with_features()
        state.shape = self._fitted(state.decision)

    def _predict_next_depth(self, state: Iteration) -> None:
        state.next_decision = self._decide_early()

    def _draft_head(self, state: Iteration) -> None:
        if self._steps is not None and (state.drafts or (self._drafts_head_first and not state.is_decided)):
            self._steps.head()

    def _draft_steps(self, state: Iteration) -> None:
        if not state.drafts or self.drafter is None:
            return
        propose_in(self.drafter, self.tree, state.root, Budget(state.shape.depth, state.shape.width))
        if self._is_checked:
            check_tree(self.tree, state.root, self.target.vocab_size, self.drafter.name)
        if self._free is not None and self._fills(self._free):
            self._free.fill(self._room, self._policy.bound(self.target.length, state.shape))

    def _fills(self, model_free: ModelFreeDrafts) -> bool:
        """Whether model-free drafts are added to a drafted tree."""
        return self._policy.wants_model_free and model_free.can_fill

    def _read_leaves(self, state: Iteration) -> None:
        if state.drafts and self._tail is not None:
            self._tail.read_leaves()

    def _read_accepted_leaf(self, state: Iteration) -> None:
        drafted = _drafted(state)
        if self._tail is not None and drafted:
            self._tail.read_leaf(drafted[-1])

    def _guess_heads(self, state: Iteration) -> None:
        if not state.verifies_drafts or self._tail is None:
            return
        if self._reads_leaves_with_head:
            self._tail.read_leaves()
        self._tail.guess(*self.target.guesses(state.outputs, state.shape.verify_width))

    # ==== verification ====

    def _prune(self, state: Iteration) -> None:
        shape = state.shape
        if not state.drafts or self.target.ranks_nodes:
            return
        by_scores, state.ranking = self._ranking.rank(), self._ranking.order
        assert state.decision is not None
        state.decision = self._policy.prune(state.decision._replace(shape=shape), by_scores, self.target.length)
        state.shape = state.decision.shape

    def _hand_over_nodes(self, state: Iteration) -> None:
        """Write the nodes to verify where the verification step reads them and makes its mask."""
        if state.verifies_tree and state.ranking is not None:
            self._order.write(state.ranking)

    def _verify(self, state: Iteration) -> None:
        width = state.shape.verify_width
        if width > 1:
            state.outputs = self.target.verify(width)
        else:
            state.outcome = self.target.plain(state.root)

    def _accept(self, state: Iteration) -> None:
        shape = state.shape
        if shape.verify_width == 1:
            return
        outcome = state.outcome = self.target.accept(state.outputs, shape.verify_width)
        if shape.width and outcome.expected is not None:
            assert state.decision is not None
            state.decision = state.decision._replace(tokens=outcome.expected)

    def _accept_on_host(self, state: Iteration) -> None:
        if state.verifies_tree:
            state.outcome = self.target.accept_on_host(state.outputs, state.shape.verify_width, self.tree)

    def _commit(self, state: Iteration) -> None:
        outcome = state.outcome
        assert outcome is not None
        assert state.decision is not None
        state.emission = Emission(outcome.tokens, state.shape, state.decision)
        if self._trace.watch is not None:
            self._trace.watch(iteration_tree(self.tree, self.target.order, state, self._guessers(state)))
        self.target.commit(outcome.rows)
        if self._tail is not None and self._keeps_rows and state.verifies_drafts:
            drafted = _drafted(state)
            is_whole = len(drafted) == len(outcome.nodes) - 1
            guess = outcome.rows[-1] if self._guesses and is_whole else None
            self._tail.keep(drafted, guess, outcome.tokens[-1])
        if self.drafter is not None:
            self.drafter.extend(outcome.tokens, outcome.layers)
        if self._free is not None:
            self._free.follow(state)

    def _guessers(self, state: Iteration) -> str:
        """Names of the drafters of this iteration's tree."""
        names = [self.drafter.name] if self.drafter is not None and state.verifies_drafts else []
        if self._free is not None and (not names or self._fills(self._free)):
            names.append(self._free.name)
        return " + ".join(names)


def _drafted(state: Iteration) -> Sequence[int]:
    """The accepted nodes that the drafter itself attached; model-free nodes can only follow below them."""
    assert state.outcome is not None
    end = 1 + state.shape.width * state.shape.depth
    return [node for node in state.outcome.nodes[1:] if node < end]
