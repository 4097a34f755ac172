"""Counts and times of a request's iterations, and the metrics computed from them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from yggdrasil.engine.targets.target import Outcome
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import TokenTree


@dataclass(frozen=True)
class IterationTree:
    """The tree of an iteration, a copy. Node 0 is the last certain token; a plain step has no other."""

    drafter: str  # names of the drafters, several with " + " between them; "none" for a plain step
    tokens: list[int]
    parents: list[int]
    verified: list[int]  # nodes that the target's pass read
    accepted: list[int]  # nodes of the accepted path, the root first
    bonus: int  # the token that the target added
    drafted: int = 0  # nodes that the drafter attached, which come first; those behind them are model-free drafts
    scores: Sequence[float] = ()  # log-acceptance estimates of the nodes
    shape: TreeShape = PLAIN_STEP


Watch = Callable[[IterationTree], None]


def iteration_tree(
    tree: TokenTree, order: Tensor, shape: TreeShape, root: int, outcome: Outcome, drafters: str
) -> IterationTree:
    """The tree of an iteration as it is after acceptance, before anything is planted anew."""
    if shape.verify_width == 1:
        return IterationTree("none", [root], [0], [0], [0], outcome.tokens[-1])
    size = tree.size
    verified = [node for node in order[: shape.verify_width].tolist() if node < size]
    tokens, parents, scores = (buffer[:size].tolist() for buffer in (tree.tokens, tree.parents, tree.scores))
    drafted = min(size - 1, shape.width * shape.depth)
    nodes = sorted(order[: shape.verify_width].tolist())  # by row; a captured step names rows alone
    accepted, bonus = [nodes[row] for row in outcome.rows], outcome.tokens[-1]
    return IterationTree(drafters, tokens, parents, verified, accepted, bonus, drafted, scores, shape)


@dataclass(frozen=True)
class DecodingReport:
    """By which rule a request was decoded, and how near its decisions were; None where nothing was counted."""

    rule: str = "match"
    lossless: bool = True  # whether the output follows the target's own distribution
    temperature: float = 0.0
    seed: int | None = None  # None where nothing was drawn
    exactness: str = "fast"
    tolerance: float | None = None  # logits; a decision led by less is a near tie
    near_ties: int | None = None
    width_one_passes: int | None = None
    flips: int | None = None  # near ties that a width-1 pass decides otherwise: mended by strict, counted by audit
    calibrated_temperature: float | None = None  # the plan's, where it is not the request's


@dataclass
class Trace:
    """Counts and times of one request. Times are nanoseconds; the first token belongs to the prefill."""

    shapes: Counter[TreeShape] = field(default_factory=Counter)
    last_shape: TreeShape = PLAIN_STEP
    iterations: int = 0
    plain_steps: int = 0
    model_free_trees: int = 0  # iterations that verified model-free drafts alone
    tokens: int = 0  # emitted by iterations, i.e. without the prefill's token
    proposed: int = 0  # drafted tokens that were verified
    accepted: int = 0
    accepted_by_depth: Counter[int] = field(default_factory=Counter)  # iterations that accepted at least so many
    stage_ns: Counter[str] = field(default_factory=Counter)
    expected_tokens: float = 0.0  # expected before verification, bonus included
    predicted_ms: float = 0.0  # of all iterations, by the plan's costs
    reused_tokens: int = 0  # of the prompt, whose rows the cache held from an earlier request
    watch: Callable[[Any], None] | None = None  # called with each iteration's ``IterationTree``
    passes: Counter[int] = field(default_factory=Counter)  # of the target that were timed, by their width
    passes_ns: Counter[int] = field(default_factory=Counter)  # what those of a width took together
    prefill_ns: int = 0
    decode_ns: int = 0

    def note(self, shape: TreeShape, tokens: int, expected: float, predicted_ms: float) -> None:
        """One iteration emitted ``tokens``, bonus included, where ``expected`` were expected."""
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
            for depth in range(1, tokens):
                self.accepted_by_depth[depth] += 1

    def note_pass(self, nanoseconds: int) -> None:
        """The target's pass of the last iteration took so long."""
        width = self.last_shape.verify_width if self.last_shape.depth else 1
        self.passes[width] += 1
        self.passes_ns[width] += nanoseconds

    def call_plain(self, verified_ns: int) -> None:
        """Count the last pass as a plain step: move the verification time beyond ``verified_ns`` to ``plain``."""
        self.stage_ns["plain"] += self.stage_ns.pop("verify") - verified_ns
        if verified_ns:
            self.stage_ns["verify"] = verified_ns

    def metrics(self) -> "Metrics":
        """Figures of the request."""
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


# Stages whose time is spent inside the two models; the rest, and what lies between stages, is overhead.
MODEL_STAGES = ("head_draft", "draft_steps", "tail_draft", "verify", "plain")


@dataclass(frozen=True)
class Metrics:
    """Figures of one request; AAL and tokens per step count the bonus token, TPOT excludes the first token."""

    iterations: int
    aal: float
    tpot_ms: float
    ttft_ms: float
    reused_tokens: int  # of the prompt, not read again because an earlier request had
    proposed: int
    accepted: int
    acceptance_rate: float
    plain_steps: int
    model_free_trees: int  # iterations that verified model-free drafts alone; their draft width is 0
    depths: dict[int, int]
    draft_widths: dict[int, int]
    verify_widths: dict[int, int]
    stage_ms: dict[str, float]
    overhead_share: float
    predicted_tpot_ms: float | None  # predicted cost over expected tokens; None without a plan
    decoding: DecodingReport = DecodingReport()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
