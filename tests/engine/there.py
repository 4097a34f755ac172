"""Requests on the device that stands in for a GPU, and what their iterations launch and wait for.

For a process of its own.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

from other_device import DEVICE, WAITS  # before anything that asks PyTorch for what it changes
from tiny_pair import TEXT, OracleDrafter, TinyPair, make_pair

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.drafters import NGramDrafter
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.iteration import Iteration
from yggdrasil.engine.loop import DecodeLoop
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.passes import HostCopies, Readback
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import TreeShape

PROMPT, COUNT = [*TEXT[:16], *TEXT[:6]], 16  # repeats itself, so that statistics find continuations
SHAPE = TreeShape(2, 2, 8)
SHAPES = Shapes(max_length=80, draft_widths=(2,), max_depth=2, candidates=2, verify_widths=(1, 8), prefill_widths=(32,))


# Tokens of a request, iterations by the depth of their trees, and accepted nodes. A tuple and no class of this module:
# the process that asks for it cannot import this module.
Answer = tuple[list[int], dict[int, int], int]


class ByTurns(FixedPolicy):
    """Trees of n-gram statistics alone at odd lengths of the text, drafted ones at even lengths."""

    wants_model_free = True

    def choose(self, context, model_free=None, features=None):
        is_free = model_free is not None and context % 2
        return Decision(TreeShape(0, model_free.depth, 8)) if is_free else super().choose(context)


class Informed(FixedPolicy):
    """Deep trees where the head draft is sure of its first token."""

    def choose(self, context, model_free=None, features=None):
        if features is None:
            return None
        assert features.hidden().shape == (64,)
        return Decision(self._decision.shape._replace(depth=2 if features.head().max() > -0.5 else 1))


AHEAD = Schedule.of({"head_draft": "ahead", "bookkeeping": "overlapped"}).labels
CASES: dict[str, tuple[FixedPolicy, Callable[[], dict[str, Any]]]] = {
    "a draft model": (FixedPolicy(SHAPE), dict),
    "statistics alone": (ModelFreePolicy(8), lambda: {"drafter": None, "model_free": default_statistics()}),
    "n-grams": (FixedPolicy(SHAPE), lambda: {"drafter": NGramDrafter()}),
    "a user's drafter": (FixedPolicy(SHAPE), lambda: {"drafter": oracle()}),
    "a user's drafter by turns with statistics": (
        ByTurns(SHAPE), lambda: {"drafter": oracle(), "model_free": default_statistics()},
    ),
    "a draft model, which tells the depth": (
        Informed(SHAPE), lambda: {"stages": Schedule.of({"depth_prediction": "informed"}).labels},
    ),
    "a draft model ahead, by turns with statistics": (
        ByTurns(SHAPE), lambda: {"model_free": default_statistics(), "stages": AHEAD},
    ),
}  # fmt: skip


@cache
def pair() -> TinyPair:
    """The models there; their references stay here."""
    here = make_pair(noise=0.02)
    target, drafter = (
        prepare_model(copy.deepcopy(model).to(DEVICE), "tiny", 1) for model in (here.plain_target, here.plain_drafter)
    )
    return here._replace(target=target, drafter=drafter)


def oracle() -> OracleDrafter:
    return OracleDrafter([*PROMPT, *pair().reference(PROMPT, COUNT + 8)])


def decode(name: str, sampling: SamplingParams) -> tuple[Answer, Answer, list[dict[str, Any]]]:
    """The answer to a request, and that of eager steps here.

    Also of each iteration the draft width, the launches of captures, the results read, and other waits.
    """
    policy, options = CASES[name]
    decoder = pair().decoder(policy, SHAPES, backend="cudagraph", **options())
    iterations: list[dict[str, Any]] = []
    calls = {"launches": 0, "reads": 0}
    watched = ((Capture, "__call__", "launches"), (Readback, "begin", "reads"), (HostCopies, "read", "reads"))
    before = [(DecodeLoop, "iterate", run := DecodeLoop.iterate)]
    before += [(owner, method, getattr(owner, method)) for owner, method, _ in watched]

    def iterate(self: DecodeLoop, state: Iteration, *others: Any) -> Iteration:
        WAITS.clear()
        calls.update(launches=0, reads=0)
        following = run(self, state, *others)
        iterations.append({"draft width": state.shape.width, **calls, "waits": list(WAITS)})
        return following

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return original(*arguments)

        return call

    DecodeLoop.iterate = iterate  # type: ignore[method-assign]
    for owner, method, name in watched:
        setattr(owner, method, counted(name, getattr(owner, method)))
    try:
        answer = answer_of(decoder, sampling)
    finally:
        for owner, method, original in before:
            setattr(owner, method, original)
    here = make_pair(noise=0.02).decoder(policy, SHAPES, backend="eager", **options())
    return answer, answer_of(here, sampling), iterations


def answer_of(decoder: Decoder, sampling: SamplingParams) -> Answer:
    result = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling)
    return result.tokens, result.metrics.depths, result.metrics.accepted
