"""What each stage does: the bodies of the stages that a schedule orders, and the values they hand to each other."""

from collections.abc import Callable, Sequence

from yggdrasil.drafters.group import DrafterGroup
from yggdrasil.drafters.protocol import Budget, Drafter, check_tree, propose_in
from yggdrasil.engine.evidence import LiveEvidence
from yggdrasil.engine.free_guesses import FreeGuesses
from yggdrasil.engine.iteration import NO_PROMISE, PLAIN_PROMISE, Emission, Iteration, Promise
from yggdrasil.engine.policy import Decision, Policy
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.engine.ranking import Ranking
from yggdrasil.engine.seen import seen_tree
from yggdrasil.engine.target import Outcome, Target
from yggdrasil.engine.text import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.runtime.buffers import HostView
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import TokenTree

Action = Callable[[Iteration], None]


class StageActions:
    """The stages over one target, at most one drafter and one tree; one request at a time.

    A drafter without ``TailDrafts`` reads all that was accepted in its next head draft, after acceptance.
    ``free`` guesses beside it, where the policy wants that: alone in its stead, or in the tree that it has grown.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tree: TokenTree,
        verify_widths: Sequence[int],
        limit: int,
        free: DrafterGroup | None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.max_length = limit
        self.verify_widths = list(verify_widths)
        self._steps = None if drafter is None else drafter.capabilities.steps
        self._tail = None if self._steps is None else self._steps.tail
        self._ranking, self._order = Ranking(tree, self.verify_widths), HostView(target.order)
        self._free: FreeGuesses | None = None
        if free is not None:
            self._free = FreeGuesses(free, target, tree, self.verify_widths, shares_tree=self._tail is None)
        self._wants_free = False
        # One that somebody else wrote: ours grow theirs in their steps.
        self._is_checked = drafter is not None and self._steps is None and tree.tokens.device.type == "cpu"
        self._keeps_books_late = False
        self._keeps_rows = self._guesses = self._reads_leaves_with_head = False
        self._drafts_head_first = self._predicts_late = False
        self._policy: Policy
        self._stream: TextStream
        self._trace: Trace
        self._promises: KeptPromises
        self._evidence: LiveEvidence

    def begin(self, policy: Policy, stream: TextStream, trace: Trace, text: list[int], first: Outcome) -> None:
        """Serve another request, whose certain ``text`` ends with what the prefill gave."""
        self._policy, self._stream, self._trace = policy, stream, trace
        self._promises = KeptPromises() if policy.learner is None else policy.learner.promises
        self._evidence = LiveEvidence(self.target, self.tree, text, first)
        self._wants_free = policy.learner is not None and policy.learner.wants_free

    def follow(self, outcome: Outcome) -> None:
        """What the policy may ask from now on: the iteration is over."""
        self._evidence.text.extend(outcome.tokens)
        self._evidence.outcome = outcome

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
        """Decide before any stage runs what can be decided by now; else the stage ``depth_prediction`` does."""
        if self._try_free(state):
            state.is_decided = True
        elif self._predicts_late:
            state.shape, state.is_decided = self._fitted(state.promise), True
        elif (resting := self._rest()) is not None:
            state.promise, state.is_decided = Promise(resting), True

    def decide_first(self) -> Promise:
        """What a request begins with: a decision where the schedule predicts depth an iteration ahead."""
        return self._promise() if self._predicts_late else PLAIN_PROMISE

    def _try_free(self, state: Iteration) -> bool:
        """Make guesses that cost no pass the iteration's tree, if the learner wants them; returns whether it does."""
        learner = self._policy.learner
        if learner is None or self._free is None or not self._wants_free:
            return False
        alone = self._free.alone
        length = self.target.text.num_rows
        waiting = len(state.previous.tokens) if state.previous is not None and self._keeps_books_late else 0
        depth = min(self.max_length - length - 2, self._stream.remaining - waiting - 1, self.verify_widths[-1] - 1)
        if depth < 1:
            return False
        decision = learner.free(alone.grow(depth, learner.stakes(length)), depth, length)
        if decision is None:
            return False
        width = decision.shape.verify_width
        state.promise, state.shape = Promise(decision, rested=False), TreeShape(0, max(alone.use(width), 1), width)
        if not alone.is_in_place:
            state.ranking = alone.order
        return True

    def _promise(self) -> Promise:
        """The policy's decision, now."""
        resting = self._rest()
        return Promise(self._policy.choose(self._evidence), rested=False) if resting is None else Promise(resting)

    def _rest(self) -> Decision | None:
        """A plain step where there is no drafter, no room for a tree, or no wish for one."""
        if self._room < 1:
            return NO_PROMISE
        resting = self._policy.rest(self.target.length)
        return NO_PROMISE if resting is None and self.drafter is None else resting

    def _fitted(self, promise: Promise) -> TreeShape:
        """The promised shape within the context that is left."""
        shape = promise.decision.shape
        if self.drafter is None or self._room < 1:
            return PLAIN_STEP
        return shape if shape.depth <= self._room else shape._replace(depth=self._room)

    @property
    def _room(self) -> int:
        """The deepest tree that fits: the text is the cache and the root, and a full path adds the bonus token too."""
        return self.max_length - self.target.length - 2

    def keep_books(self, emission: Emission | None) -> None:
        """Detokenise, look for the end, note."""
        if emission is not None:
            tokens, shape, decision = emission
            self._trace.note(shape, self._stream.push(tokens), decision.tokens, decision.milliseconds)

    # ==== drafting ====

    def _predict_depth(self, state: Iteration) -> None:
        if state.is_decided:
            return
        state.promise = Promise(self._policy.choose(self._evidence), rested=False)
        state.shape = self._fitted(state.promise)

    def _predict_next_depth(self, state: Iteration) -> None:
        state.next_promise = self._promise()

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
            assert self._policy.learner is not None
            self._free.fill(self._room, self._policy.learner.stakes_beside(state.shape, self.target.length))

    def _fills(self, free: FreeGuesses) -> bool:
        """Whether guesses that cost no pass are added to a drafted tree."""
        return self._wants_free and free.can_fill

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
        decision = self._policy.prune(shape, self._promises.honest(by_scores), self.target.length)
        state.shape = decision.shape
        self._promise_by_tree(state, decision, by_scores[self.verify_widths.index(decision.shape.verify_width)])

    def _promise_by_tree(self, state: Iteration, decision: Decision, expected: float) -> None:
        """What the tree's own scores promise follows the text; the depth's promise knows only what came before it."""
        state.expected = expected
        honest = self._promises.honest([expected])[0]
        believed = state.promise.decision.believed
        state.promise = Promise(Decision(decision.shape, honest, decision.milliseconds, believed), state.promise.rested)

    def _hand_over_nodes(self, state: Iteration) -> None:
        """The verification step reads its nodes, and from them its mask, where this puts them; some are there."""
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
            self._promise_by_tree(state, state.promise.decision, outcome.expected)
        self._learn(state, outcome)

    def _accept_on_host(self, state: Iteration) -> None:
        if state.verifies_tree:
            state.outcome = self.target.accept_on_host(state.outputs, state.shape.verify_width, self.tree)
            self._learn(state, state.outcome)

    def _learn(self, state: Iteration, outcome: Outcome) -> None:
        if state.shape.width:  # what free trees keep is a matter of their own
            self._promises.observe(max(state.expected - 1.0, 0.0), len(outcome.tokens) - 1)

    def _commit(self, state: Iteration) -> None:
        outcome = state.outcome
        assert outcome is not None
        state.emission = Emission(outcome.tokens, state.shape, state.promise.decision)
        if self._trace.watch is not None:
            self._trace.watch(seen_tree(self.tree, self.target.order, state, self._guessers(state)))
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
        """Who guessed in this iteration's tree."""
        names = [self.drafter.name] if self.drafter is not None and state.verifies_drafts else []
        if self._free is not None and (not names or self._fills(self._free)):
            names.append(self._free.name)
        return " + ".join(names)


def _drafted(state: Iteration) -> Sequence[int]:
    """The accepted nodes below the root that the drafter itself attached: others can only have gone on below them."""
    assert state.outcome is not None
    end = 1 + state.shape.width * state.shape.depth
    return [node for node in state.outcome.nodes[1:] if node < end]
