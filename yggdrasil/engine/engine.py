"""The decode loop of one request: prefill, then iterations of the plan's stages until the text ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor

from yggdrasil.drafters.protocol import Drafter
from yggdrasil.engine.policy import Policy
from yggdrasil.engine.target import Outcome, TargetModel
from yggdrasil.engine.text import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.stages import DEFAULT_ORDER, check_order
from yggdrasil.tree.growth import rank_nodes
from yggdrasil.tree.objective import TreeShape
from yggdrasil.tree.token_tree import TokenTree


@dataclass
class Iteration:
    """Values that stages hand to each other; ``outcome`` and ``root`` outlive the iteration."""

    root: int  # last certain token
    hidden: Tensor  # [H] float32, the target's state that produced it
    shape: TreeShape
    expected: float = 1.0
    outputs: Sequence[Tensor] = ()
    outcome: Outcome | None = None


class Engine:
    """Runs requests one at a time over one target, at most one drafter and one tree."""

    def __init__(
        self,
        target: TargetModel,
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
        self._stages = [(name, actions[name]) for name in stages]
        self._policy: Policy
        self._stream: TextStream

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], stream: TextStream, policy: Policy, trace: Trace) -> Iterator[str]:
        """Yield final text as it becomes certain. ``prompt`` is not empty and shorter than ``max_length``.

        The caller may stop iterating at any point: the next request starts from an empty cache.

        Raises:
            YggdrasilError: iterated further after another request began on this engine.
        """
        self._policy, self._stream = policy, stream
        policy.begin()
        start = perf_counter_ns()
        with _own_threads():
            outcome = self._prefill(prompt)
        stream.push(outcome.tokens)
        state = Iteration(outcome.tokens[-1], outcome.hidden, TreeShape(0, 0, 1))
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
            context = self.target.length
            with _own_threads():
                self._iterate(state, trace)
            predicted_ms = policy.predict_ms(state.shape, context)
            trace.note(state.shape, len(stream.tokens) - emitted, state.expected, predicted_ms)
            elapsed_ns = perf_counter_ns() - start
            policy.settle(state.shape, len(stream.tokens) - emitted, elapsed_ns / 1e6)
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

    def _iterate(self, state: Iteration, trace: Trace) -> None:
        """Run the plan's stages in order, noting the time of each."""
        times = trace.stage_ns
        before = perf_counter_ns()
        for name, action in self._stages:
            action(state)
            now = perf_counter_ns()
            times["plain" if name == "verify" and state.shape.depth == 0 else name] += now - before
            before = now

    # ==== stages ====

    def _predict_depth(self, state: Iteration) -> None:
        hidden = state.hidden.numpy() if self._policy.needs_hidden else None
        shape = self._policy.choose(hidden, self.target.length)
        # The text is the cache and the root; an accepted path of full depth adds the bonus token too.
        room = self.max_length - self.target.length - 2
        if self.drafter is None or room < 1:
            shape = TreeShape(0, 0, 1)
        elif shape.depth > room:
            shape = shape._replace(depth=room)
        state.shape, state.expected = shape, 1.0

    def _draft_head(self, state: Iteration) -> None:
        if state.shape.depth and self.drafter is not None:
            self.drafter.head(self.tree)

    def _draft_steps(self, state: Iteration) -> None:
        if state.shape.depth and self.drafter is not None:
            self.drafter.grow(self.tree, state.shape.width, state.shape.depth)

    def _prune(self, state: Iteration) -> None:
        shape = state.shape
        if not shape.depth:
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
            self._policy.observe(state.shape, state.expected, len(state.outcome.tokens))

    def _commit(self, state: Iteration) -> None:
        assert state.outcome is not None
        self.target.commit(state.outcome.rows)
        if self.drafter is not None:
            self.drafter.extend(state.outcome.tokens, state.outcome.layers)
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
