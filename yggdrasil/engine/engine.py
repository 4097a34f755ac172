"""The decode loop of one request: prefill, then iterations of the plan's stages until the text ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor

from yggdrasil.drafters.protocol import Drafter
from yggdrasil.engine.captured_target import CapturedTarget
from yggdrasil.engine.policy import Decision, Policy
from yggdrasil.engine.target import Outcome, TargetModel
from yggdrasil.engine.text import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.predictor.evidence import Float32Array, Repetition
from yggdrasil.scheduling.stages import DEFAULT_ORDER, check_order, is_head_first
from yggdrasil.tree.growth import rank_nodes
from yggdrasil.tree.objective import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import TokenTree

NO_PROMISE = Decision(PLAIN_STEP)


@dataclass
class Iteration:
    """Values that stages hand to each other; ``text``, ``root``, ``hidden`` and ``outcome`` outlive the iteration."""

    text: list[int]  # certain tokens, the prompt included
    root: int  # last certain token
    hidden: Tensor  # [H] float32, the target's state that produced it
    promise: Decision = NO_PROMISE  # made before drafting
    shape: TreeShape = PLAIN_STEP
    expected: float = 1.0  # tokens, by the drafted tree's scores
    outputs: Sequence[Tensor] = ()
    outcome: Outcome | None = None


class LiveEvidence:
    """What a policy may ask of a request's present iteration; every part is read when it is asked for."""

    def __init__(self, target: TargetModel | CapturedTarget, tree: TokenTree, state: Iteration) -> None:
        self._target, self._tree, self._state = target, tree, state
        self._repetition, self._num_read = Repetition(), 0

    @property
    def context(self) -> int:
        return self._target.length

    def hidden(self) -> Float32Array:
        values: Float32Array = self._state.hidden.cpu().numpy()
        return values

    def repetition(self) -> Float32Array:
        self._repetition.extend(self._state.text[self._num_read :])
        self._num_read = len(self._state.text)
        return self._repetition.figures()

    def head(self) -> Float32Array:
        values: Float32Array = self._tree.root_guesses().numpy()
        return values


# What is left of an iteration without a tree.
PLAIN_STAGES = ("verify", "accept", "commit", "bookkeeping")


class Engine:
    """Runs requests one at a time over one target, at most one drafter and one tree."""

    def __init__(
        self,
        target: TargetModel | CapturedTarget,
        drafter: Drafter | None,
        tree: TokenTree,
        verify_widths: Sequence[int],
        max_length: int,
        stages: Sequence[str] = DEFAULT_ORDER,
    ) -> None:
        check_order(stages)
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.max_length = max_length
        self.verify_widths = list(verify_widths)
        self._expected_at = torch.tensor(self.verify_widths, device=target.order.device) - 1
        actions: dict[str, Callable[[Iteration], None]] = {
            "depth_prediction": self._predict_depth,
            "head_draft": self._draft_head,
            "draft_steps": self._draft_steps,
            "prune": self._prune,
            "verify": self._verify,
            "accept": self._accept,
            "commit": self._commit,
            "bookkeeping": self._keep_books,
        }
        self.after_stage: Callable[[], None] | None = None  # a measurement waits for the device here
        self._stages = [(name, actions[name]) for name in stages]
        self._plain_stages = [(name, actions[name]) for name in stages if name in PLAIN_STAGES]
        self._is_head_first = is_head_first(stages)
        self._policy: Policy
        self._evidence: LiveEvidence
        self._stream: TextStream

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], stream: TextStream, policy: Policy, trace: Trace) -> Iterator[str]:
        """Yield final text as it becomes certain. ``prompt`` is not empty and shorter than ``max_length``.

        The caller may stop iterating at any point: the next request starts from an empty cache.

        Raises:
            YggdrasilError: iterated further after another request began on this engine.
        """
        self._policy, self._stream = policy, stream
        if policy.learner is not None:
            policy.learner.begin()
        start = perf_counter_ns()
        with _own_threads():
            outcome = self._prefill(prompt)
        stream.push(outcome.tokens)
        state = Iteration([*prompt, *outcome.tokens], outcome.tokens[-1], outcome.hidden)
        self._evidence = LiveEvidence(self.target, self.tree, state)
        trace.prefill_ns = perf_counter_ns() - start
        yield stream.release()
        while stream.finish_reason is None:
            if self._stream is not stream:
                raise YggdrasilError("another request has begun on this decoder; it serves one at a time")
            if self.target.length + 1 >= self.max_length:
                stream.finish("context")
                break
            start = perf_counter_ns()
            emitted = len(stream.tokens)
            with _own_threads():
                rested = self._iterate(state, trace)
            tokens = len(stream.tokens) - emitted
            trace.note(state.shape, tokens, state.promise.tokens, state.promise.milliseconds)
            elapsed_ns = perf_counter_ns() - start
            if policy.learner is not None:
                policy.learner.settle(tokens, elapsed_ns / 1e6, rested=rested)
            trace.decode_ns += elapsed_ns
            yield stream.release()
        yield stream.release()

    def _prefill(self, prompt: Sequence[int]) -> Outcome:
        outcomes = list(self.target.prefill(prompt))
        first = outcomes[-1]
        if self.drafter is not None:
            layers = {
                layer: torch.cat([outcome.layers[layer] for outcome in outcomes])
                for layer in self.drafter.hidden_layers
            }
            # Every token but the first has a state that produced it, the prompt's tokens included.
            self.drafter.begin(prompt[:1])
            self.drafter.extend([*prompt[1:], *first.tokens], layers)
        return first

    def _iterate(self, state: Iteration, trace: Trace) -> bool:
        """Run the plan's stages in order, noting the time of each; True where speculation rested."""
        times = trace.stage_ns
        before = perf_counter_ns()
        resting = self._rest()
        state.promise, state.shape, state.expected = resting or NO_PROMISE, PLAIN_STEP, 1.0
        for name, action in self._stages if resting is None else self._plain_stages:
            action(state)
            if self.after_stage is not None:
                self.after_stage()
            now = perf_counter_ns()
            times["plain" if name == "verify" and state.shape.depth == 0 else name] += now - before
            before = now
        return resting is not None

    def _rest(self) -> Decision | None:
        """A plain step where there is no drafter, no room for a tree, or no wish for one."""
        if self.drafter is None or self._room < 1:
            return NO_PROMISE
        return self._policy.rest(self.target.length)

    @property
    def _room(self) -> int:
        """The deepest tree that fits: the text is the cache and the root, and a full path adds the bonus token too."""
        return self.max_length - self.target.length - 2

    # ==== stages ====

    def _predict_depth(self, state: Iteration) -> None:
        state.promise = self._policy.choose(self._evidence)
        shape = state.promise.shape
        state.shape = shape._replace(depth=min(shape.depth, self._room))

    def _draft_head(self, state: Iteration) -> None:
        if self.drafter is not None and (self._is_head_first or state.shape.depth):
            self.drafter.head(self.tree)

    def _draft_steps(self, state: Iteration) -> None:
        if state.shape.depth and self.drafter is not None:
            self.drafter.grow(self.tree, state.shape.width, state.shape.depth)

    def _prune(self, state: Iteration) -> None:
        shape = state.shape
        if not shape.depth or self.target.ranks_nodes:
            return
        order, expected = rank_nodes(self.tree)
        self.target.order.copy_(order)
        expected_host = expected[self._expected_at].tolist()
        width = self._policy.choose_verify_width(shape, expected_host, self.target.length)
        state.shape = shape._replace(verify_width=width)
        state.expected = expected_host[self.verify_widths.index(width)]

    def _verify(self, state: Iteration) -> None:
        if state.shape.verify_width == 1:
            state.outcome = self.target.plain(state.root)
        else:
            state.outputs = self.target.verify(state.shape.verify_width)

    def _accept(self, state: Iteration) -> None:
        if state.shape.verify_width > 1:
            state.outcome = self.target.accept(state.outputs, state.shape.verify_width)
            if state.outcome.expected is not None:
                state.expected = state.outcome.expected
            if self._policy.learner is not None:
                promised = max(state.expected - 1.0, 0.0)
                self._policy.learner.observe(promised, len(state.outcome.tokens) - 1)

    def _commit(self, state: Iteration) -> None:
        assert state.outcome is not None
        self.target.commit(state.outcome.rows)
        if self.drafter is not None:
            self.drafter.extend(state.outcome.tokens, state.outcome.layers)
        state.text.extend(state.outcome.tokens)
        state.root, state.hidden = state.outcome.tokens[-1], state.outcome.hidden

    def _keep_books(self, state: Iteration) -> None:
        assert state.outcome is not None
        self._stream.push(state.outcome.tokens)


@contextmanager
def _own_threads() -> Iterator[None]:
    """Keep PyTorch's own pool out of the way: its idle threads spin on the cores that our operators' threads need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
