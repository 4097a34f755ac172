"""A plan: a YAML file with all settings to decode with one target and its drafters on one machine.

Imports no torch. Binary data (predictor weights, acceptance tables) is stored in the predictor folder that the plan
refers to.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from yggdrasil.artifacts import MOST_THREADS, Machine, parse_dataclass, read_yaml, to_plain, write_yaml
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.drafters.model_free_options import ModelFreeOptions
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import Objective
from yggdrasil.scheduling.stages import Schedule, is_head_first

KIND, SCHEMA_VERSION = "plan", 6  # 6: model_free_overhead_ms; scorer.safetensors in the predictor folder
PACKAGE_PREFIX = "yggdrasil:"  # prefix of sources relative to the installed package
CACHE_PREFIX = "cache:"  # prefix of sources relative to the user's cache folder

_MOST_DEPTH = 1024  # levels; far more than any text accepts

# "head": the predictor also reads the head draft's candidates, so the head draft runs before the depth is chosen.
DepthSource = Literal["predictor", "head", "mean"]
DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Shapes:
    """All sizes that are fixed before decoding."""

    max_length: int = 2048  # tokens of a request, prompt included
    draft_widths: tuple[int, ...] = (1, 2, 4, 8)  # empty if there is no draft model or head
    max_depth: int = 8  # the most draft steps of a tree
    candidates: int = 8  # top-k continuations stored per drafted node
    verify_widths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 16, 32, 64)
    prefill_widths: tuple[int, ...] = (16, 32, 64, 128)  # narrow ones for short turns of a chat
    spare_nodes: int = 0  # nodes beyond those of equal growth, for other trees and drafters

    def __post_init__(self) -> None:
        for name in ("draft_widths", "verify_widths", "prefill_widths"):
            widths = getattr(self, name)
            is_missing = not widths and name != "draft_widths"
            if is_missing or list(widths) != sorted(set(widths)) or min(widths, default=1) < 1:
                raise ValueError(f"{name} must be ascending, distinct and at least 1, got {list(widths)}")
        if not 1 <= self.max_depth <= _MOST_DEPTH or self.max_length < 2:
            raise ValueError(
                f"max_depth ({self.max_depth}) must be 1 to {_MOST_DEPTH}, and max_length ({self.max_length}) 2 or more"
            )
        if self.candidates < 1 or self.spare_nodes < 0:
            given = f"candidates ({self.candidates}) must be 1 or more, spare_nodes ({self.spare_nodes}) 0 or more"
            raise ValueError(given)
        if self.widest_draft > self.candidates:
            raise ValueError(f"candidates ({self.candidates}) must reach the widest draft width, {self.widest_draft}")

    @property
    def widest_draft(self) -> int:
        """The largest draft width; 0 without draft widths."""
        return max(self.draft_widths, default=0)

    @property
    def num_nodes(self) -> int:
        """Capacity of the tree in nodes, root included."""
        return max(1 + self.max_depth * self.widest_draft, self.verify_widths[-1]) + self.spare_nodes

    @property
    def widest_pass(self) -> int:
        """Rows of the widest pass that the target may run: a prefill chunk, a verification, or all ``num_nodes``."""
        return max(*self.prefill_widths, *self.verify_widths, self.num_nodes)

    @property
    def cache_capacity(self) -> int:
        """Number of KV cache slots: the longest text, then the temporary rows of the widest step.

        A head draft ahead of acceptance writes its rows after those of the tree, whose root is at most the last but one
        token of the text.
        """
        guesses = self.num_nodes + self.verify_widths[-1] - 2
        return self.max_length + max(self.num_nodes, guesses, self.prefill_widths[-1], self.max_depth + 1)


@dataclass(frozen=True)
class ModelRef:
    """A checkpoint in a plan: source, fingerprint, number of CPU threads and weight format."""

    source: str
    fingerprint: str
    threads: int
    weights: Weights = "full"

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads must be 0 to {MOST_THREADS}, got {self.threads}")

    def path(self) -> str:
        """Return the path or hub id to load: ``source`` with a prefix ``yggdrasil:`` or ``cache:`` resolved."""
        return resolve_source(self.source)


@dataclass(frozen=True)
class Costs:
    """Measured step costs in milliseconds, at one context length in tokens."""

    context: int
    head_ms: float  # head draft: the drafter's pass over newly committed tokens
    draft_ms: dict[int, float]  # draft width -> time of each draft step but the last
    verify_ms: dict[int, float]  # verify width -> time of a target pass
    overhead_ms: float  # of an iteration, outside the models
    plain_ms: float  # an iteration of plain decoding, its overhead included
    model_free_overhead_ms: float | None = None  # of iterations with model-free drafts only
    reading_ms: float = 0.0  # drafter's prefill time per token

    def steps(self) -> StepCosts:
        """Return the costs without their context length, as the policy takes them.

        Raises:
            ValueError: a cost is missing, negative or infinite.
        """
        return StepCosts(
            self.head_ms, self.draft_ms, self.verify_ms, self.overhead_ms, self.plain_ms, self.model_free_overhead_ms,
            self.reading_ms,
        )  # fmt: skip


@dataclass(frozen=True)
class Expectation:
    """Simulated results of a policy on held-out text."""

    policy: str
    aal: float
    tpot_ms: float
    speedup: float  # over plain compiled decoding
    repeats: float | None = None  # share of the text predictable from earlier repetitions; None: not measured

    def describe(self) -> str:
        """Return one line: speed-up, average accepted length (AAL) and milliseconds per token."""
        repeats = "" if self.repeats is None else f", on text of which {self.repeats:.0%} repeats itself"
        return f"{self.speedup:.2f} x plain decoding, AAL {self.aal:.2f}, {self.tpot_ms:.3g} ms per token{repeats}"


@dataclass(frozen=True)
class LeftOut:
    """A requested drafter that the plan omits, because simulation found no reliable gain."""

    drafter: ModelRef
    drafting: Expectation
    without: Expectation

    def describe(self) -> str:
        """Return one line: the omitted drafter, and the milliseconds per token with and without it."""
        return (
            f"{self.drafter.source}, which does not reliably pay: {self.drafting.tpot_ms:.3g} ms per token with it, "
            f"{self.without.tpot_ms:.3g} without"
        )


@dataclass(frozen=True)
class Searched:
    """A candidate plan of a schedule search. Measured fields are None if the candidate was only predicted."""

    name: str
    stages: tuple[str, ...]
    shape: tuple[int, int, int]  # draft width, depth, verify width
    backend: str
    predicted_aal: float
    predicted_iteration_ms: float
    predicted_ms_per_token: float
    measured_aal: float | None = None
    measured_iteration_ms: float | None = None
    measured_ms_per_token: float | None = None
    measured_speedup: float | None = None  # over plain decoding in the same run


@dataclass(frozen=True)
class SearchResult:
    """Result of a schedule search: the chosen plan and all candidates.

    ``entries`` has the best predictions first, named "top 1", "top 2" and so on, then the named plans, and plain
    decoding last if plans were measured.
    """

    objective: Objective
    chosen: str  # name of the entry whose stages the plan uses
    entries: list[Searched]
    calibrated: list[Costs]  # the plan's costs before the search, under the default schedule

    def entry(self, name: str) -> Searched | None:
        """Return the candidate plan called ``name``, or None if the search had none."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass(frozen=True)
class Plan:
    """All settings to decode with one target and its drafters on one machine, stored as a YAML file."""

    name: str
    machine: Machine
    versions: dict[str, str]  # package -> version
    dtype: Literal["bfloat16", "float32"]
    target: ModelRef
    drafters: list[ModelRef | ModelFreeOptions]  # at most one model or head, which is first; all draft in one tree
    tokenizer: str  # fingerprint of the tokenizer
    shapes: Shapes
    stages: tuple[str, ...]  # labels of the schedule, in launch order
    objective: Objective
    depth_from: DepthSource
    predictor: str  # folder, relative to the plan file
    costs: list[Costs]
    predicted: Expectation
    rejected: list[Expectation] = field(default_factory=list)  # other policies that were simulated
    device: DeviceName = "cpu"  # device of both models
    search: SearchResult | None = None  # set if a schedule search chose the stages
    left_out: LeftOut | None = None
    draft_vocabulary: int | None = None  # size of a head's restricted vocabulary; None: not restricted
    is_provisional: bool = False  # created at a model's first use, not by a calibration
    agreement: tuple[float, ...] = ()  # a head's share of drafts that equal the target's tokens, by draft step

    def __post_init__(self) -> None:
        Schedule.parse(self.stages)
        if any(isinstance(each, ModelRef) for each in self.drafters[1:]):
            raise ValueError("drafters may name one model, and that first")
        if len({type(each) for each in self.drafters}) < len(self.drafters):
            raise ValueError("drafters names one kind twice")
        if self.draft_vocabulary is not None and (self.drafter is None or self.draft_vocabulary < 1):
            raise ValueError(f"draft_vocabulary is {self.draft_vocabulary}, which no drafter has")
        if self.drafter is not None and not self.shapes.draft_widths:
            raise ValueError("draft_widths is empty, but a model drafts")
        if self.depth_from == "head" and not is_head_first(self.stages):
            raise ValueError("depth_from is head, but head_draft runs after depth_prediction")
        if not self.costs:
            raise ValueError("costs is empty")
        for costs in self.costs:
            costs.steps()
            if costs.context < 0:
                raise ValueError(f"costs are given for a context of {costs.context} tokens")
            if set(costs.verify_ms) != set(self.shapes.verify_widths):
                raise ValueError(
                    f"costs at context {costs.context} are for verify widths {sorted(costs.verify_ms)}, "
                    f"the shapes name {list(self.shapes.verify_widths)}"
                )

    @property
    def drafter(self) -> ModelRef | None:
        """The draft model or head; None if all drafters are model-free."""
        return next((each for each in self.drafters if isinstance(each, ModelRef)), None)

    @property
    def model_free(self) -> tuple[ModelFreeOptions, ...]:
        """Options of the model-free drafters (n-gram statistics and look-up), in the plan's order."""
        return tuple(each for each in self.drafters if not isinstance(each, ModelRef))

    def save(self, path: Path) -> None:
        """Write the plan to ``path`` as YAML, with a schema version and a checksum, replacing an existing file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        write_yaml(path, KIND, SCHEMA_VERSION, to_plain(self))

    def weights_in(self, dtype: str, model: ModelRef | None = None) -> Weights:
        """Return the weight format in which to load a model for arithmetic in ``dtype``, "bfloat16" or "float32".

        The format is the plan's, except that a GGUF file's quantised blocks are dequantised ("full") if ``dtype`` is
        not the plan's.

        Args:
            model: the target or the drafter of the plan; None is the target.
        """
        weights = (model or self.target).weights
        return "full" if weights == "file" and dtype != self.dtype else weights

    def describe(self) -> str:
        """Return one line: name, machine, dtype and, if weights are not full, their format."""
        kept = {"full": "", "file": "; weights as the GGUF file has them"}.get(
            self.target.weights, f"; weights rounded to {self.target.weights.upper()}"
        )
        return f"{self.name} on {self.machine.describe()}; {self.dtype}{kept}"

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Load a plan from a YAML file.

        Raises:
            ArtifactError: the file is missing, damaged, inconsistent or has unknown keys.
        """
        return parse_dataclass(cls, read_yaml(path, KIND, SCHEMA_VERSION), str(path))


def resolve_source(source: str) -> str:
    """Return the absolute path of a plan's checkpoint source; a path or hub id without a prefix is returned as it is.

    Args:
        source: ``yggdrasil:FOLDER`` is relative to the package, ``cache:FOLDER`` to the user's cache folder.
    """
    if source.startswith(PACKAGE_PREFIX):
        return str(Path(__file__).parent.parent / source.removeprefix(PACKAGE_PREFIX))
    if source.startswith(CACHE_PREFIX):
        return str(cache_root() / source.removeprefix(CACHE_PREFIX))
    return source


def portable_source(source: str) -> str:
    """Return a checkpoint's source as a plan stores it; ``resolve_source`` is the inverse.

    A path inside the package becomes ``yggdrasil:PATH``, a path inside the user's cache ``cache:PATH``, and any other
    existing path an absolute path. A source that does not exist as a path, such as a hub id, is returned unchanged.
    """
    path = Path(source)
    if not path.exists():
        return source
    resolved = path.resolve()
    for prefix, folder in ((PACKAGE_PREFIX, Path(__file__).parent.parent), (CACHE_PREFIX, cache_root().resolve())):
        if resolved.is_relative_to(folder):
            return prefix + resolved.relative_to(folder).as_posix()
    return str(resolved)


def check_plan(plan: Plan, machine: Machine, *, force_machine: bool) -> None:
    """Check that ``plan`` was calibrated on ``machine``; ``force_machine`` allows any machine.

    Raises:
        YggdrasilError: the fingerprints of the machines differ.
    """
    if plan.machine.fingerprint != machine.fingerprint and not force_machine:
        raise YggdrasilError(
            f"plan {plan.name} was calibrated on {plan.machine.describe()}, this machine is {machine.describe()}; "
            "calibrate here, or use it all the same with --force-machine"
        )
