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
from yggdrasil.engine.iteration import Iteration
from yggdrasil.engine.loop import DecodeLoop
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.passes import Readback
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PROMPT, COUNT = [*TEXT[:16], *TEXT[:6]], 16  # repeats itself, so that statistics find continuations
SHAPE = TreeShape(2, 2, 8)
SHAPES = Shapes(max_length=80, draft_widths=(2,), max_depth=2, candidates=2, verify_widths=(1, 8), prefill_widths=(32,))


class ByTurns(FixedPolicy):
    """Trees of n-gram statistics alone at odd lengths of the text, drafted ones at even lengths."""

    wants_model_free = True

    def choose(self, context, model_free=None, features=None):
        is_free = model_free is not None and context % 2
        return Decision(TreeShape(0, model_free.depth, 8)) if is_free else super().choose(context)


AHEAD = Schedule.of({"head_draft": "ahead", "bookkeeping": "overlapped"}).labels
CASES: dict[str, tuple[FixedPolicy, Callable[[], dict[str, Any]]]] = {
    "a draft model": (FixedPolicy(SHAPE), dict),
    "statistics alone": (ModelFreePolicy(8), lambda: {"drafter": None, "model_free": default_statistics()}),
    "n-grams": (FixedPolicy(SHAPE), lambda: {"drafter": NGramDrafter()}),
    "a user's drafter": (FixedPolicy(SHAPE), lambda: {"drafter": oracle()}),
    "a user's drafter by turns with statistics": (
        ByTurns(SHAPE), lambda: {"drafter": oracle(), "model_free": default_statistics()},
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


def decode(name: str, sampling: SamplingParams) -> tuple[list[int], list[int], list[dict[str, Any]]]:
    """Tokens of a request, and those of eager steps here.

    Also of each iteration the draft width, the launches of captures, the results read, and other waits.
    """
    policy, options = CASES[name]
    decoder = pair().decoder(policy, SHAPES, backend="cudagraph", **options())
    iterations: list[dict[str, Any]] = []
    calls = {"launches": 0, "reads": 0}
    run, launch, read = DecodeLoop.iterate, Capture.__call__, Readback.begin

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
    Capture.__call__ = counted("launches", launch)  # type: ignore[method-assign]
    Readback.begin = counted("reads", read)  # type: ignore[method-assign]
    try:
        tokens = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling).tokens
    finally:
        DecodeLoop.iterate, Capture.__call__, Readback.begin = run, launch, read  # type: ignore[method-assign]
    here = make_pair(noise=0.02).decoder(FixedPolicy(PLAIN_STEP), SHAPES, backend="eager", drafter=None)
    return tokens, here.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling).tokens, iterations
