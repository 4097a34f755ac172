"""Counts and times of a request's iterations, the executors that time its stages, and the metrics of a request."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter_ns
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from yggdrasil.engine.targets.target import Outcome
from yggdrasil.scheduling.stages import STAGES, Schedule
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import TokenTree


@dataclass(frozen=True)
class IterationTree:
    """A copy of an iteration's tree. Node 0 is the last committed token, and the only one of a plain step."""

    drafter: str  # names of the drafters, joined by " + "; "none" for a plain step
    tokens: list[int]  # token id of each node
    parents: list[int]  # index of each node's parent; 0 for the root itself
    verified: list[int]  # nodes in the target's pass
    accepted: list[int]  # nodes of the accepted path, the root first
    bonus: int  # the bonus token
    drafted: int = 0  # nodes 1 .. drafted are the drafter's; later ones are model-free drafts
    scores: Sequence[float] = ()  # estimated log-probability of acceptance of each node
    shape: TreeShape = PLAIN_STEP


Watch = Callable[[IterationTree], None]


def iteration_tree(
    tree: TokenTree, order: Tensor, shape: TreeShape, root: int, outcome: Outcome, drafters: str
) -> IterationTree:
    """Copy an iteration's tree to Python lists, with the verified and accepted nodes.

    Call it before the next iteration writes its root, which overwrites ``tree``.

    Args:
        order: [N] int64, node indices by descending score; the first ``shape.verify_width`` were verified.
        shape: the iteration's tree shape; of a plain step, ``tree`` and ``order`` are not read.
        root: token id of the root, the last token committed before the iteration.
        outcome: result of the target's pass, with the accepted nodes and the bonus token.
        drafters: names of the drafters, joined by " + ".
    """
    if shape.verify_width == 1:
        return IterationTree("none", [root], [0], [0], [0], outcome.tokens[-1])
    size = tree.size
    verified = [node for node in order[: shape.verify_width].tolist() if node < size]
    tokens, parents, scores = (buffer[:size].tolist() for buffer in (tree.tokens, tree.parents, tree.scores))
    drafted = min(size - 1, shape.width * shape.depth)
    accepted, bonus = list(outcome.nodes), outcome.tokens[-1]
    return IterationTree(drafters, tokens, parents, verified, accepted, bonus, drafted, scores, shape)


@dataclass(frozen=True)
class DecodingReport:
    """How a request was decoded: rule, sampling, exactness and near ties. Counts are None if not measured."""

    rule: str = "match"
    lossless: bool = True  # whether the output has the target's own distribution
    temperature: float = 0.0
    seed: int | None = None  # None if nothing was sampled
    exactness: str = "fast"
    tolerance: float | None = None  # in logits; a decision with a smaller lead is a near tie
    near_ties: int | None = None
    width_one_passes: int | None = None
    flips: int | None = None  # near ties that a width-1 pass decides differently: corrected by strict, counted by audit
    calibrated_temperature: float | None = None  # the plan's, if it is not the request's


@dataclass
class Trace:
    """Counts and times of one request. Times are nanoseconds; the first token belongs to the prefill."""

    shapes: Counter[TreeShape] = field(default_factory=Counter)
    last_shape: TreeShape = PLAIN_STEP
    iterations: int = 0
    plain_steps: int = 0
    model_free_trees: int = 0  # iterations that verified only model-free drafts
    tokens: int = 0  # from iterations, without the prefill's token
    proposed: int = 0  # verified drafted tokens
    accepted: int = 0  # of the proposed tokens
    stage_ns: Counter[str] = field(default_factory=Counter)  # by stage name
    expected_tokens: float = 0.0  # expected before verification, bonus included
    predicted_ms: float = 0.0  # predicted time of all iterations
    reused_tokens: int = 0  # prompt tokens reused from the cache
    watch: Callable[[Any], None] | None = None  # called with each iteration's ``IterationTree``
    passes: Counter[int] = field(default_factory=Counter)  # timed target passes, by width
    passes_ns: Counter[int] = field(default_factory=Counter)  # total time of the timed passes, by width
    prefill_ns: int = 0
    decode_ns: int = 0

    def note(self, shape: TreeShape, tokens: int, expected: float, predicted_ms: float) -> None:
        """Count an iteration that verified ``shape`` and added ``tokens`` tokens to the text, bonus token included.

        Args:
            expected: tokens that the policy predicted, bonus token included.
            predicted_ms: milliseconds that the policy predicted.
        """
        self.expected_tokens += expected
        self.predicted_ms += predicted_ms
        self.shapes[shape] += 1
        self.last_shape = shape
        self.iterations += 1
        self.tokens += tokens
        if shape.depth == 0:
            self.plain_steps += 1
        else:
            self.model_free_trees += shape.width == 0
            self.proposed += shape.verify_width - 1
            self.accepted += tokens - 1

    def note_pass(self, nanoseconds: int) -> None:
        """Add the nanoseconds of a target pass to the total of the verify width that ``note`` counted last."""
        width = self.last_shape.verify_width if self.last_shape.depth else 1
        self.passes[width] += 1
        self.passes_ns[width] += nanoseconds

    def count_as_plain(self, verified_ns: int) -> None:
        """Move the time of the last target pass from the stage "verify" to "plain".

        ``verified_ns`` is the total of "verify" before that pass, in nanoseconds.
        """
        self.stage_ns["plain"] += self.stage_ns.pop("verify") - verified_ns
        if verified_ns:
            self.stage_ns["verify"] = verified_ns

    def metrics(self) -> "Metrics":
        """Return the request's metrics, computed from the counts and times so far."""
        decode_ms = self.decode_ns / 1e6
        model_ms = sum(self.stage_ns[stage] for stage in MODEL_STAGES) / 1e6
        histograms: list[Counter[int]] = [Counter(), Counter(), Counter()]
        for shape, count in self.shapes.items():
            for histogram, value in zip(histograms, (shape.depth, shape.width, shape.verify_width), strict=True):
                histogram[value] += count
        return Metrics(
            iterations=self.iterations,
            aal=self.tokens / self.iterations if self.iterations else 0.0,
            tpot_ms=decode_ms / self.tokens if self.tokens else 0.0,
            ttft_ms=self.prefill_ns / 1e6,
            reused_tokens=self.reused_tokens,
            proposed=self.proposed,
            accepted=self.accepted,
            acceptance_rate=self.accepted / self.proposed if self.proposed else 0.0,
            plain_steps=self.plain_steps,
            model_free_trees=self.model_free_trees,
            depths=dict(sorted(histograms[0].items())),
            draft_widths=dict(sorted(histograms[1].items())),
            verify_widths=dict(sorted(histograms[2].items())),
            stage_ms={stage: ns / 1e6 for stage, ns in self.stage_ns.items()},
            overhead_share=1 - model_ms / decode_ms if decode_ms else 0.0,
            predicted_tpot_ms=self.predicted_ms / self.expected_tokens if self.predicted_ms else None,
        )


# Stages that run a model. Other stages, and time between stages, count as overhead.
MODEL_STAGES = ("head_draft", "draft_steps", "tail_draft", "verify", "plain")


@dataclass(frozen=True)
class Metrics:
    """Metrics of one request. AAL includes the bonus token; TPOT excludes the first token."""

    iterations: int
    aal: float
    tpot_ms: float
    ttft_ms: float
    reused_tokens: int  # prompt tokens reused from the cache
    proposed: int  # drafted tokens that the target verified
    accepted: int  # proposed tokens that the target accepted
    acceptance_rate: float
    plain_steps: int
    model_free_trees: int  # iterations that verified only model-free drafts; their draft width is 0
    depths: dict[int, int]  # depth -> iterations
    draft_widths: dict[int, int]  # draft width -> iterations
    verify_widths: dict[int, int]  # verify width -> iterations
    stage_ms: dict[str, float]  # stage name -> total milliseconds
    overhead_share: float  # share of the decoding time spent outside the models, 0 to 1
    predicted_tpot_ms: float | None  # predicted cost over expected tokens; None without a plan
    decoding: DecodingReport = DecodingReport()

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics as a dictionary by field name, nested fields included."""
        return asdict(self)


State = TypeVar("State")
Actions = Mapping[str, Callable[[State], None]]  # by stage name; stages without an entry do nothing


class InOrderExecutor:
    """Executor that runs the stages on one thread, in the schedule's order.

    This is fastest on a CPU, where verification uses all cores. Times are measured on the host: on a GPU they are the
    times of launching work and of waiting for the device.
    """

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        """Call the actions of the schedule's stages with ``state``, in order; stages without an action are skipped.

        Each stage's nanoseconds on the host are added to ``times``, by stage name.
        """
        before = perf_counter_ns()
        for name in schedule.names:
            if name not in actions:
                continue
            actions[name](state)
            now = perf_counter_ns()
            times[name] += now - before
            before = now


class EventExecutor:
    """Executor that runs the stages in order, and times them on the GPU's timeline, waiting for work included.

    The host waits for the GPU once, at the end of an iteration. ``make_event`` creates a timing event, such as
    torch.cuda.Event.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._events = [make_event() for _ in range(1 + len(STAGES))]

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        """Call the actions of the schedule's stages with ``state``, in order; stages without an action are skipped.

        Each stage's nanoseconds on the GPU are added to ``times``. The host waits for all stages at the end.
        """
        names = [name for name in schedule.names if name in actions]
        events = self._events[: 1 + len(names)]
        events[0].record()
        for name, event in zip(names, events[1:], strict=True):
            actions[name](state)
            event.record()
        events[-1].synchronize()
        for name, before, after in zip(names, events, events[1:], strict=False):
            times[name] += round(before.elapsed_time(after) * 1e6)


Executor: TypeAlias = InOrderExecutor | EventExecutor  # runs the stages of one iteration, and waits for all
