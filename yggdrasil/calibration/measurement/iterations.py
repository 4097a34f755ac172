"""Times the stages of real iterations: their overhead, head drafts, and the drafter's reading of a text.

The engine decodes real text, so CPU caches are as warm as in decoding. Kinds of iterations take turns, because a shared
machine's speed changes within seconds.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from yggdrasil.calibration.measurement.steps import Sample
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.engine import Engine
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import MODEL_STAGES, EventExecutor, Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy, Policy
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

WARM_UP = 2  # first iterations of a request, which are dropped: other code, buffers and threads ran before
PATIENCE = 4  # most iterations run per wanted sample: not every iteration has model-free drafts
READ, USUAL = 5, 4  # number of timed readings of a prompt by the drafter; head drafts timed after each for comparison
DEPTH = 4  # the most levels of the drafted trees; head drafts read as many tokens as such trees have accepted


class TimedIteration(NamedTuple):
    """The tree shape of one iteration, the milliseconds of its stages by name, and its total milliseconds."""

    shape: TreeShape
    stages: dict[str, float]
    total_ms: float


def timed_iterations(
    engine: Engine,
    text: Sequence[int],
    stream: TextStream,
    policy: Policy,
    progress: Callable[[float], None] = lambda _: None,
) -> Generator[TimedIteration]:
    """Decode after the prompt ``text`` (token ids) and yield the time of each iteration until ``stream`` has ended.

    The prefill, which gives the first token, is not an iteration. ``progress`` takes the prefilled fraction of
    ``text``, 0 to 1. Closing the generator ends the request.
    """
    trace = Trace()
    request = engine.decode(text, stream, policy, trace)
    next(request)
    seen, seen_ns, counted = dict(trace.stage_ns), 0, 0
    for _ in request:
        if trace.iterations == counted:  # neither a chunk of the prefill nor the end of the text is an iteration
            progress(min(1.0, engine.target.length / len(text)))
            continue
        counted = trace.iterations
        stages = {name: (ns - seen.get(name, 0)) / 1e6 for name, ns in trace.stage_ns.items()}
        yield TimedIteration(trace.last_shape, stages, (trace.decode_ns - seen_ns) / 1e6)
        seen, seen_ns = dict(trace.stage_ns), trace.decode_ns


@contextmanager
def on_device_clock(assembly: Assembly) -> Iterator[None]:
    """Within the context, time the stages of an iteration by CUDA events on a GPU, and by the host's clock on a CPU.

    On a GPU launches return early, so the host's clock would not see a stage's time.
    """
    engine = assembly.engine
    before = engine.executor
    if assembly.target.loaded.device.type == "cuda":
        engine.executor = EventExecutor(partial(torch.cuda.Event, enable_timing=True))
    try:
        yield
    finally:
        engine.executor = before


def wide_widths(shapes: Shapes) -> list[int]:
    """Return the verify widths above 1, which trees can use, ascending.

    Raises:
        YggdrasilError: 1 is the only verify width.
    """
    wide = [width for width in shapes.verify_widths if width > 1]
    if not wide:
        raise YggdrasilError("the only verify width is 1, which no tree can use; give --verify-widths such as 1,2,4,8")
    return wide


def measured_policies(assembly: Assembly) -> list[FixedPolicy]:
    """Return the policies whose iterations are timed: plain steps, model-free trees, and trees of each draft width.

    The policies are in this order. Policies that the assembly has no drafter for are left out.

    Raises:
        YggdrasilError: there is a drafter, and the only verify width is 1.
    """
    shapes, trees = assembly.shapes, [PLAIN_STEP]
    if shapes.draft_widths:
        wide, depth = wide_widths(shapes), min(DEPTH, shapes.max_depth)
        trees += [TreeShape(width, depth, wide[i % len(wide)]) for i, width in enumerate(shapes.draft_widths)]
    policies = [FixedPolicy(tree) for tree in trees]
    if assembly.engine.model_free is not None and shapes.verify_widths[-1] > 1:
        for policy in policies:
            policy.wants_model_free = True
        policies.insert(1, ModelFreePolicy(shapes.verify_widths[-1]))
    return policies


def prefill_text(
    assembly: Assembly, stream: Callable[[], TextStream], text: Sequence[int], progress: Callable[[float], None]
) -> None:
    """Prefill the token ids ``text``, so that later requests with this prompt reuse its KV entries.

    Args:
        stream: makes the text stream of a request.
        progress: takes the fraction prefilled, 0 to 1.
    """
    request = timed_iterations(assembly.engine, text, stream(), FixedPolicy(PLAIN_STEP), progress)
    next(request)
    request.close()


def measure_iterations(
    assembly: Assembly,
    stream: Callable[[], TextStream],
    text: Sequence[int],
    policies: Sequence[Policy],
    samples: int,
    turns: int,
    progress: Callable[[float], None],
) -> list[Sample]:
    """Time the stages of real iterations, and return one sample per stage and iteration, in milliseconds.

    In a turn, each policy decodes one request after ``text``. Besides its stages, an iteration has the samples
    "overhead", its time outside the models, and "iteration", its whole time. Call it within ``on_device_clock``:
    otherwise stages on a GPU are timed by the host's clock.

    Args:
        stream: makes the text stream of a request.
        text: token ids of the prompt.
        policies: the policies to decode with, such as ``measured_policies`` returns.
        samples: maximum number of timed iterations per request, after ``WARM_UP`` untimed iterations. With a
            ``ModelFreePolicy``, an iteration without drafts does not count, and has only the samples "overhead" and
            "iteration". At most about ``PATIENCE`` times ``samples`` iterations are run.
        turns: number of turns.
        progress: takes the fraction done, 0 to 1.
    """
    rows: list[Sample] = []
    for number in range(turns * len(policies)):
        turn, index = divmod(number, len(policies))
        policy, wanted = policies[index], samples
        request = timed_iterations(assembly.engine, text, stream(), policy)
        for shape, stages, total in islice(request, WARM_UP, PATIENCE * (WARM_UP + samples)):
            outside = total - sum(ms for name, ms in stages.items() if name in MODEL_STAGES)
            times = {"overhead": outside, "iteration": total}
            if shape.depth or not isinstance(policy, ModelFreePolicy):  # else there were no drafts
                times, wanted = stages | times, wanted - 1
            levels = (
                shape._replace(depth=1) if shape.is_model_free else shape
            )  # a model-free tree is as deep as its drafts
            rows += [Sample(len(text), turn, *levels, name, ms) for name, ms in times.items()]
            if not wanted:
                break
        request.close()
        progress((number + 1) / (turns * len(policies)))
    return rows


def measure_reading(
    assembly: Assembly, stream: Callable[[], TextStream], text: Sequence[int], progress: Callable[[float], None]
) -> list[Sample]:
    """Time how long the drafter reads a prompt: ``READ`` samples of the stage "reading", milliseconds per token.

    A sample is the time of a request's first head draft, which reads the prompt, minus the median of the next head
    drafts, divided by the prompt's length. Each request has ``text`` rotated differently, because KV entries of a known
    text would be reused. The result is empty without a draft model or head.

    Args:
        stream: makes the text stream of a request.
        text: token ids of the prompt.
        progress: takes the fraction done, 0 to 1.

    Raises:
        YggdrasilError: the only verify width is 1.
    """
    shapes, found = assembly.shapes, list[Sample]()
    if not shapes.draft_widths:
        return found
    policy = FixedPolicy(TreeShape(shapes.draft_widths[0], 1, wide_widths(shapes)[0]))
    for number in range(1, READ + 1):
        first = number * len(text) // (READ + 1)

        def report(part: float, done: int = number - 1) -> None:
            progress((done + part) / READ)

        request = timed_iterations(assembly.engine, [*text[first:], *text[:first]], stream(), policy, report)
        heads = [each.stages["head_draft"] for each in islice(request, 1 + USUAL)]
        request.close()
        ms = (heads[0] - float(np.median(heads[1:]))) / len(text)
        found.append(Sample(len(text), 0, *PLAIN_STEP, "reading", ms))
    return found
