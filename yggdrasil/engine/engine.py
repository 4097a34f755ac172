"""The engine: runs a request's prefill, then iterations of draft, verification and commit until the text ends."""

from collections.abc import Generator, Iterator, Sequence
from time import perf_counter_ns

import torch

from yggdrasil.drafters.level_drafter import LevelDrafter
from yggdrasil.drafters.protocol import Drafter, DrafterGroup, num_kept
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.engine.loop import DecodeLoop
from yggdrasil.engine.targets.captured_target import CapturedTarget, check_capturable
from yggdrasil.engine.targets.logit_target import Target
from yggdrasil.engine.targets.target import Outcome
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import Executor, InOrderExecutor, Trace
from yggdrasil.policy.fixed import Policy
from yggdrasil.scheduling.stages import DEFAULT_ORDER, Schedule
from yggdrasil.tree.token_tree import TokenTree


class Engine:
    """Runner of one request at a time over one target, an optional drafter and one tree.

    Args:
        verify_widths: ascending numbers of rows for which the target has verification steps.
        max_length: context length in tokens, prompt and answer together.
        stages: labels of the schedule, the order of an iteration's stages with their variants.
        model_free: n-gram and other drafters without a model. They extend the drafter's tree, or draft alone where the
            policy leaves the drafter out.

    The attribute ``executor`` runs and times the stages. It may be replaced between requests.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tree: TokenTree,
        verify_widths: Sequence[int],
        max_length: int,
        stages: Sequence[str] = DEFAULT_ORDER,
        model_free: DrafterGroup | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.max_length = max_length
        self.executor: Executor = InOrderExecutor()
        self.model_free = model_free
        self._mode = SingleThreadInference()
        self.loop = DecodeLoop(target, drafter, tree, verify_widths, max_length, model_free)
        self.use_schedule(stages)

    def use_schedule(self, stages: Sequence[str]) -> None:
        """Set the schedule of later requests: the labels of an iteration's stages with their variants, in order.

        Raises:
            ValueError: the order is not legal.
            YggdrasilError: the target's steps are CUDA graphs and do not support the schedule.
        """
        schedule = Schedule.parse(stages)
        if isinstance(self.target, CapturedTarget):
            check_capturable(schedule)
        self.schedule = schedule
        self.loop.use_schedule(schedule)

    def follow_draws(self, seed: int | None, temperature: float) -> None:
        """Pass the seed and temperature of the next request to the drafters, which then predict the target's draws.

        Args:
            seed: None if no draws are to be predicted, as for a greedy request; ``temperature`` is not used then.
        """
        for drafter in (self.drafter, *(self.model_free.drafters if self.model_free else ())):
            if isinstance(drafter, LevelDrafter | StatisticsDrafter):
                drafter.follow_draws(seed, temperature)

    def decode(
        self, prompt: Sequence[int], stream: TextStream, policy: Policy, trace: Trace
    ) -> Generator[str, None, None]:
        """Decode one request, and yield each piece of text as soon as no later token can change it.

        Pieces may be empty; the first ones are yielded during prefill. KV entries of the prefix shared with the last
        request's text are reused. The caller may stop at any piece, but the generator must have ended or be closed
        before another request begins.

        Args:
            prompt: token ids, at least one and fewer than ``max_length``.
            stream: receives the tokens, and finds the end of the text.
            policy: chooses the tree shape of each iteration, and is updated by the result.
            trace: receives counts and times.
        """
        try:
            yield from self._decode(prompt, stream, policy, trace)
        except Exception:  # cache rows may be damaged
            self.forget()
            raise
        except KeyboardInterrupt:  # cache rows of committed tokens are still valid
            self.target.figures.forget()
            raise

    def forget(self) -> None:
        """Invalidate the target's KV cache, so that the next request prefills its whole prompt.

        The drafter's cache is not changed. Call this method after other code than the engine has written the target's
        cache.
        """
        self.target.text.forget()
        self.target.figures.forget()

    def _decode(self, prompt: Sequence[int], stream: TextStream, policy: Policy, trace: Trace) -> Iterator[str]:
        policy.begin()
        start = perf_counter_ns()
        self.target.prepare_cache(len(prompt) + stream.remaining)
        outcome = yield from self._prefill(prompt, trace)
        self.target.text.tokens.extend(outcome.tokens)
        stream.push(outcome.tokens)
        with self._mode:
            state = self.loop.begin(policy, stream, trace, outcome)
        trace.prefill_ns = perf_counter_ns() - start
        yield stream.release()
        while stream.finish_reason is None:
            with self._mode:
                state, done = self.loop.iterate(state, self.executor), 1
                while stream.finish_reason is None and not stream.is_read and done < stream.most_unread:
                    state, done = self.loop.iterate(state, self.executor), done + 1
            yield stream.release()
        yield stream.release()

    def _prefill(self, prompt: Sequence[int], trace: Trace) -> Generator[str, None, Outcome]:
        """Prefill the prompt. Yield after every chunk, so that the caller may stop."""
        # The last token is recomputed for its logits, and so are tokens whose hidden states a drafter needs.
        most = len(prompt) if self.drafter is None else num_kept(self.drafter, prompt)
        start = self.target.text.shared(prompt, most=min(len(prompt), most) - 1)
        trace.reused_tokens = start
        outcomes: list[Outcome] = []
        chunks = self.target.prefill(prompt, start)
        while True:
            with self._mode:
                outcome = next(chunks, None)
            if outcome is None:
                break
            outcomes.append(outcome)
            yield ""
        with self._mode:
            self._begin_drafters(prompt, start, outcomes)
        return outcomes[-1]

    def _begin_drafters(self, prompt: Sequence[int], start: int, outcomes: Sequence[Outcome]) -> None:
        """Begin the request in every drafter. ``outcomes`` are those of the prompt's chunks from token ``start`` on."""
        first = outcomes[-1]
        if self.model_free is not None:
            self.model_free.begin(prompt)
            self.model_free.extend(first.tokens, {})
        if self.drafter is not None:
            layers = {
                layer: torch.cat([outcome.layers[layer] for outcome in outcomes])
                for layer in self.drafter.capabilities.layers
            }
            # Every token but the first has the hidden state of the position before it, prompt tokens included.
            self.drafter.begin(prompt[: start + 1])
            self.drafter.extend([*prompt[start + 1 :], *first.tokens], layers)


class SingleThreadInference:
    """Context manager that runs its block in ``torch.inference_mode`` with one thread in PyTorch's own pool.

    Idle threads of that pool would spin on the cores that our operators' threads need. An instance is reusable but not
    reentrant. It is entered for each step, because a generator must not yield inside ``torch.inference_mode``.
    """

    def __init__(self) -> None:
        self._inference = torch.inference_mode()
        self._before = 1

    def __enter__(self) -> None:
        self._inference.__enter__()
        self._before = torch.get_num_threads()
        if self._before != 1:
            torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        if self._before != 1:
            torch.set_num_threads(self._before)
        self._inference.__exit__(*error)
