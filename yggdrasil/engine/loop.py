"""The decode loop: each iteration drafts, prunes, verifies, accepts and commits, in the order of the schedule."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from time import perf_counter_ns
from typing import ClassVar

from yggdrasil.compiler.compiled import BuildClock
from yggdrasil.drafters.protocol import Budget, Drafter, DrafterGroup, check_tree
from yggdrasil.engine.iteration import Emission, Iteration, LiveFeatures, ModelFreeDrafts, ShapeChoice
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.engine.targets.logit_target import Target
from yggdrasil.engine.targets.target import Outcome
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import Executor, Trace, iteration_tree
from yggdrasil.policy.fixed import Policy
from yggdrasil.runtime.passes import HostCopies, HostView
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.token_tree import Ranking, TokenTree


class DecodeLoop:
    """Runner of iterations over one target, an optional drafter and one tree, for one request at a time.

    A drafter without tail drafts runs all accepted tokens in its next head draft. The drafters of ``model_free`` draft
    if the policy wants them: they replace the drafter, or add nodes to its tree. ``max_length`` is the context length
    in tokens.
    """

    _policy: Policy
    _stream: TextStream
    _trace: Trace

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tree: TokenTree,
        verify_widths: Sequence[int],
        max_length: int,
        model_free: DrafterGroup | None,
    ) -> None:
        self.target, self.drafter, self.tree = target, drafter, tree
        self._max_length = max_length
        self._steps = None if drafter is None else drafter.capabilities.steps
        self._tail = None if self._steps is None else self._steps.tail
        # On a GPU the next tree is drafted before the last pass's outcome is known, and model-free drafts extend it.
        drafts = target.next_drafts if isinstance(target, CapturedTarget) else None
        self._next = drafts if drafts is not None and drafts.serves(drafter) else None
        # The tree in which the host grows or extends drafted trees for captured steps; None if it does not.
        self._host = target.host_tree if self._steps is None else None
        self._drafted = tree if self._host is None else self._host.tree  # the tree that the drafter grows
        if self._next is not None:
            self._host = self._next.host
        ranked = tree if self._host is None else self._host.tree
        self._ranking, self._order = Ranking(ranked, verify_widths), HostView(target.order)
        device = tree.tokens.device
        self._copies = None if device.type == "cpu" else HostCopies(device)
        self._free: ModelFreeDrafts | None = None
        if model_free is not None:
            shares = self._tail is None  # else ``tree`` may hold the next root already
            self._free = ModelFreeDrafts(model_free, target, tree, verify_widths, shares_tree=shares, host=self._host)
        # Trees of users' drafters are checked; compiled steps attach only valid tokens.
        is_here = self._drafted.tokens.device.type == "cpu"
        self._is_checked = drafter is not None and self._steps is None and is_here
        # On a GPU the verify stage only launches the pass, and the next stage waits for it.
        self._is_captured = isinstance(target, CapturedTarget)
        self._times_passes = target.order.device.type == "cpu" and not self._is_captured
        self._choice = ShapeChoice(
            target, self._free, verify_widths[-1] - 1, max_length, has_drafter=drafter is not None
        )

    def use_schedule(self, schedule: Schedule) -> None:
        """Set the schedule (order and variants of the stages) of later iterations."""
        self._schedule, self._variants = schedule, schedule.variants
        self._actions: Mapping[str, Callable[[Iteration], None]] = {
            stage.name: self.ACTIONS[stage.label].__get__(self)
            for stage in schedule.stages
            if stage.label in self.ACTIONS
        }
        self._drafts_heads_ahead = self._variants["head_draft"] == "ahead"
        # With captured steps, an ahead-of-time tail draft shares a launch with the head draft.
        is_superset = self._variants["tail_draft"] == "superset"
        self._reads_leaves_with_head = self._drafts_heads_ahead and (is_superset or self._is_captured)
        # Other head and tail drafts, and features of the head draft, need the host between acceptance and draft.
        self._drafts_next = self._next is not None and (
            not self._drafts_heads_ahead and is_superset and self._variants["depth_prediction"] != "informed"
        )
        self._choice.use_schedule(schedule)

    def begin(self, policy: Policy, stream: TextStream, trace: Trace, first: Outcome) -> Iteration:
        """Begin a request, and return the state of its first iteration.

        Args:
            first: the prefill's last outcome, with the first generated token.
        """
        self._policy, self._stream, self._trace = policy, stream, trace
        features = LiveFeatures(self.target, self.tree, self.target.text.tokens, first, self._copies)
        return Iteration(first.tokens[-1], self._choice.begin(policy, stream, features))

    # ==== draft ====

    def _predict_depth(self, state: Iteration) -> None:
        self._choice.predict_depth(state)

    def _predict_next_depth(self, state: Iteration) -> None:
        state.next_decision = self._choice.predict()

    def _draft_head(self, state: Iteration) -> None:
        is_early = self._variants["depth_prediction"] == "informed" and not state.is_decided
        if self._steps is not None and (state.drafts or is_early):
            self._steps.head()

    def _draft_steps(self, state: Iteration) -> None:
        if not state.drafts or self.drafter is None:
            return
        if not self.drafter.capabilities.plants_root:
            self._drafted.plant(state.root)
        budget = Budget(state.shape.depth, state.shape.width)
        is_copied = self._next is not None and self._next.has_grown(budget)
        self.drafter.propose(self._drafted, budget)
        if self._is_checked:
            check_tree(self._drafted, state.root, self.target.vocab_size, self.drafter.name)
        fills = self._free is not None and self._fills(self._free)
        state.is_on_host = self._host is not None and (fills or self._steps is None)
        if self._free is not None and fills:
            if self._host is not None and self._steps is not None and not is_copied:
                self._host.fetch()
            self._free.fill(self._choice.max_tree_depth)

    def _fills(self, model_free: ModelFreeDrafts) -> bool:
        """Return whether model-free drafts are added to a drafted tree."""
        is_possible = model_free.can_fill if self._next is None else self._drafts_next
        return self._policy.wants_model_free and is_possible

    def _draft_next(self, state: Iteration) -> None:
        """Launch the next drafts, below the tokens that the launched pass commits, if the next tree is likely drafted.

        Nothing is launched if this iteration verifies model-free drafts alone, because the next tree then likely has
        only model-free drafts too. If model-free drafts will extend the drafted tree, wait until it is on the host.
        """
        if self._next is None or not self._drafts_next or not state.verifies_drafts or not self._next.can_launch:
            return
        fills = self._free is not None and self._fills(self._free)
        if fills != state.is_on_host or (self._trace.watch is not None and not fills):  # the watcher reads this tree
            return
        shape = self._choice.expect(state)
        if shape is None:
            return
        if self._trace.watch is not None and self._host is not None:
            state.watched = deepcopy(self._host.tree)
        self._next.launch(state.outputs, state.shape.verify_width, Budget(shape.depth, shape.width))
        if fills and self._host is not None:
            self._host.wait()

    def _read_leaves(self, state: Iteration) -> None:
        if state.drafts and self._tail is not None and not self._reads_leaves_with_head:
            self._tail.read_leaves()

    def _read_accepted_leaf(self, state: Iteration) -> None:
        if self._tail is not None and (drafted := state.accepted_drafts):
            self._tail.read_leaf(drafted[-1])

    def _guess_heads(self, state: Iteration) -> None:
        if not state.verifies_drafts or self._tail is None:
            return
        nodes, tokens = self.target.guesses(state.outputs, state.shape.verify_width)
        self._tail.guess(nodes, tokens, reads_leaves=self._reads_leaves_with_head)

    # ==== prune ====

    def _prune(self, state: Iteration) -> None:
        if not state.drafts or (self.target.ranks_nodes and not state.is_on_host):
            return
        expected, state.ranking = self._ranking.rank(), self._ranking.order
        assert state.decision is not None
        drafted = state.decision._replace(shape=state.shape)
        state.decision = self._policy.prune(drafted, expected, self.target.length)
        state.shape = state.decision.shape

    def _hand_over_nodes(self, state: Iteration) -> None:
        """Write the ranked nodes to the input buffer of the verify step; captured passes rank the tree themselves."""
        if not state.verifies_tree:
            return
        if state.is_on_host:
            assert self._host is not None
            self._host.write()
        elif state.ranking is not None and not self.target.ranks_nodes:
            self._order.write(state.ranking)

    # ==== verify ====

    def _verify(self, state: Iteration) -> None:
        if state.verifies_tree:
            state.outputs = self.target.verify(state.shape.verify_width)
        else:
            state.outcome = self.target.plain(state.root)

    # ==== accept ====

    def _accept(self, state: Iteration) -> None:
        if not state.verifies_tree:
            return
        self._draft_next(state)
        outcome = state.outcome = self.target.accept(state.outputs, state.shape.verify_width)
        if state.shape.width and outcome.expected is not None:
            assert state.decision is not None
            state.decision = state.decision._replace(tokens=outcome.expected)

    def _accept_on_host(self, state: Iteration) -> None:
        if state.verifies_tree:
            state.outcome = self.target.accept_on_host(state.outputs, state.shape.verify_width, self.tree)

    # ==== commit ====

    def _commit(self, state: Iteration) -> None:
        outcome = state.outcome
        assert outcome is not None
        assert state.decision is not None
        state.emission = Emission(outcome.tokens, state.shape, state.decision)
        if self._trace.watch is not None:
            tree, order, names = state.watched or self.tree, self.target.order, self._names(state)
            self._trace.watch(iteration_tree(tree, order, state.shape, state.root, outcome, names))
        self.target.commit(outcome.rows)
        keeps_rows = self._drafts_heads_ahead or self._variants["tail_draft"] != "superset"
        if self._tail is not None and keeps_rows and state.verifies_drafts:
            drafted = state.accepted_drafts
            is_whole = len(drafted) == len(outcome.nodes) - 1
            guess = outcome.rows[-1] if self._drafts_heads_ahead and is_whole else None
            self._tail.keep(drafted, guess, at_once=self._variants["depth_prediction"] == "informed")
        if self.drafter is not None:
            self.drafter.extend(outcome.tokens, outcome.layers)
        if self._free is not None:
            self._free.extend(outcome.tokens)

    def _names(self, state: Iteration) -> str:
        """Return the names of the drafters of this iteration's tree, joined by " + "."""
        names = [self.drafter.name] if self.drafter is not None and state.verifies_drafts else []
        if self._free is not None and (not names or self._fills(self._free)):
            names.append(self._free.name)
        return " + ".join(names)

    def _keep_books(self, emission: Emission | None) -> None:
        """Detokenise the emitted tokens, check for the end of the text, and count the iteration."""
        if emission is not None:
            tokens, shape, decision = emission
            self._trace.note(shape, self._stream.push(tokens), decision.tokens, decision.milliseconds)

    def _keep_books_now(self, state: Iteration) -> None:
        self._keep_books(state.emission)

    def _keep_books_late(self, state: Iteration) -> None:
        self._keep_books(state.previous)

    # ==== the iteration ====

    def iterate(self, state: Iteration, executor: Executor) -> Iteration:
        """Run one iteration from its ``state``, and return the state of the next one.

        The policy chooses the tree shape, ``executor`` runs the stages in the schedule's order, and the policy updates
        its estimates by the number of committed tokens and the time. If the context is full, end the text with the
        reason "context" and return ``state`` itself.
        """
        trace = self._trace
        if self.target.text.num_rows + 1 >= self._max_length:
            if self._variants["bookkeeping"] == "overlapped":
                self._keep_books(state.previous)
            self._stream.finish("context")
            return state
        start, built, verified_ns = perf_counter_ns(), BuildClock.ns, trace.stage_ns.get("verify", 0)
        self._choice.decide(state)
        executor.run(self._schedule, self._actions, state, trace.stage_ns)
        if self._is_captured:  # the verify stage only launches the pass; accept waits for it
            trace.stage_ns["verify"] += trace.stage_ns["accept"]
            trace.stage_ns["accept"] = 0
        pass_ns = trace.stage_ns["verify"] - verified_ns
        if state.shape.depth == 0:
            trace.count_as_plain(verified_ns)
        assert state.outcome is not None
        assert state.decision is not None
        tokens, features = state.outcome.tokens, self._choice.features
        features.text.extend(tokens)
        features.outcome = state.outcome
        # Iterations that loaded a step and ran it for the first time are not representative.
        if BuildClock.ns == built:
            self._policy.observe(state.decision, len(tokens), (perf_counter_ns() - start) / 1e6)
            if self._times_passes:
                trace.note_pass(pass_ns)
        trace.decode_ns += perf_counter_ns() - start
        return state.following()

    # Stage label -> action. A schedule has every stage once, in one variant. An action does nothing if the iteration
    # does not need it, such as drafting in a plain step. tail_draft=superset has no action: the head draft includes it.
    ACTIONS: ClassVar[dict[str, Callable[["DecodeLoop", Iteration], None]]] = {
        # draft
        "depth_prediction=now": _predict_depth,
        "depth_prediction=informed": _predict_depth,
        "depth_prediction=late": _predict_next_depth,
        "head_draft=after": _draft_head,
        "head_draft=ahead": _guess_heads,
        "draft_steps": _draft_steps,
        "tail_draft=conditional": _read_accepted_leaf,
        "tail_draft=ahead": _read_leaves,
        # prune
        "prune": _prune,
        "mask": _hand_over_nodes,
        # verify
        "verify": _verify,
        # accept
        "accept=device": _accept,
        "accept=host": _accept_on_host,
        # commit
        "commit": _commit,
        "bookkeeping=inline": _keep_books_now,
        "bookkeeping=overlapped": _keep_books_late,
    }
