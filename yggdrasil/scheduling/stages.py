"""The stages of an iteration (paper section 5): inputs, outputs and resource of each, and their legal orders.

An iteration is a graph. Dependencies follow from the stages' inputs and outputs, and a ``Schedule`` that violates one
cannot be built. Some variants of a stage remove dependencies: they compute a superset ahead of time, or decide one
iteration late. The values that these variants compute for the next iteration exist when that iteration begins. Imports
no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

Resource = Literal["host", "target", "drafter"]  # the host's thread, or the model that runs the stage


class Stage(NamedTuple):
    """A part of an iteration, in one of its variants."""

    name: str
    variant: str  # empty if the stage has only one
    resource: Resource
    inputs: frozenset[str]  # names of the values that must exist before the stage runs
    outputs: frozenset[str]  # names of the values that the stage computes
    joins: frozenset[str] = frozenset()  # inputs only if a stage of the schedule outputs them

    @property
    def label(self) -> str:
        """The stage as written in plans: ``name`` or ``name=variant``."""
        return f"{self.name}={self.variant}" if self.variant else self.name


def _stage(name: str, resource: Resource, inputs: str, outputs: str, joins: str = "") -> Stage:
    name, _, variant = name.partition("=")
    return Stage(name, variant, resource, *(frozenset(text.split()) for text in (inputs, outputs, joins)))


_ALL = (
    _stage("depth_prediction=now", "host", "hidden", "shape drafts"),
    _stage("depth_prediction=informed", "host", "hidden root", "shape"),  # also reads the head draft's candidates
    _stage("depth_prediction=late", "host", "hidden", "next_shape"),
    _stage("head_draft=after", "drafter", "certain", "root", joins="drafts"),  # its size does not depend on the shape
    _stage("head_draft=ahead", "drafter", "choices leaves", "guesses"),
    _stage("draft_steps", "drafter", "root shape", "tree"),
    _stage("tail_draft=superset", "drafter", "tree", "leaves"),
    _stage("tail_draft=conditional", "drafter", "tree accepted", "leaves"),
    _stage("tail_draft=ahead", "drafter", "tree", "leaves"),
    _stage("bookkeeping=inline", "host", "emission", "emitted"),
    _stage("bookkeeping=overlapped", "host", "previous_emission", "emitted"),
    _stage("prune", "host", "tree", "ranking verify_width"),
    _stage("mask", "target", "ranking verify_width", "verify_inputs"),
    _stage("verify", "target", "verify_inputs", "choices"),
    _stage("accept=device", "target", "choices", "accepted"),
    _stage("accept=host", "host", "choices", "accepted"),
    _stage("commit", "host", "accepted leaves", "emission next_certain next_hidden", joins="guesses"),
)
# Stage name -> variant -> stage. The first variant is the default.
STAGES: dict[str, dict[str, Stage]] = {}
for _one in _ALL:
    STAGES.setdefault(_one.name, {})[_one.variant] = _one
# Values that exist when an iteration begins: always the text and its last hidden state, and values of these variants.
_ALWAYS = frozenset({"certain", "hidden"})
_CARRIED = {
    ("depth_prediction", "late"): "shape",
    ("head_draft", "ahead"): "root",
    ("bookkeeping", "overlapped"): "previous_emission",
}


@dataclass(frozen=True)
class Schedule:
    """All stages, each once, in launch order.

    Raises:
        ValueError: a stage is unknown, missing, repeated or runs before its inputs exist; the message names it.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        missing = [name for name in STAGES if name not in names]
        if missing:
            raise ValueError(f"the stage {missing[0]!r} is missing")
        if len(names) != len(set(names)):
            raise ValueError("a stage is listed twice")
        given = {output for stage in self.stages for output in stage.outputs}
        known = set(self.initial)
        for stage in self.stages:
            lacking = (stage.inputs | (stage.joins & given)) - known
            if lacking:
                raise ValueError(f"the stage {stage.name!r} runs before {', '.join(sorted(lacking))} exists")
            known |= stage.outputs

    @classmethod
    def parse(cls, labels: Sequence[str]) -> "Schedule":
        """Return the schedule with the stages of ``labels``, in this order.

        Args:
            labels: ``name`` (its default variant) or ``name=variant`` of every stage.

        Raises:
            ValueError: a stage is unknown, missing or repeated, or runs before its inputs exist.
        """
        return cls(tuple(_parse(label) for label in labels))

    @classmethod
    def of(cls, variants: Mapping[str, str]) -> "Schedule":
        """Return the schedule in which every stage is launched as early as its inputs allow.

        Args:
            variants: stage name -> variant. A stage that is not named has its default variant; names of no stage are
                ignored.

        Raises:
            ValueError: a stage has no such variant.
        """
        wanted = [_variant(name, variants.get(name, "")) for name in STAGES]
        return cls(next(_orders(wanted)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the stages in launch order."""
        return tuple(stage.name for stage in self.stages)

    @property
    def labels(self) -> tuple[str, ...]:
        """Stages as written in plans, ``name`` or ``name=variant``, in launch order."""
        return tuple(stage.label for stage in self.stages)

    @cached_property
    def variants(self) -> dict[str, str]:
        """Stage name -> variant, for the stages that have several variants, in launch order."""
        return {stage.name: stage.variant for stage in self.stages if stage.variant}

    @property
    def initial(self) -> frozenset[str]:
        """Names of the values (inputs of stages) that exist when an iteration begins."""
        return _initial(self.stages)

    @cached_property
    def predecessors(self) -> dict[str, frozenset[str]]:
        """For each stage's name, the names of the stages whose outputs it reads."""
        giver = {output: stage.name for stage in self.stages for output in stage.outputs}
        return {
            stage.name: frozenset(giver[value] for value in stage.inputs | stage.joins if value in giver)
            for stage in self.stages
        }

    def orders(self) -> Iterator["Schedule"]:
        """Yield every legal order of the schedule's stages with their variants, the earliest-launch order first."""
        for stages in _orders([_variant(name, self.variants.get(name, "")) for name in STAGES]):
            yield Schedule(stages)


def _variant(name: str, variant: str) -> Stage:
    variants = STAGES[name]
    if variant and variant not in variants:
        raise ValueError(
            f"the stage {name!r} has no variant {variant!r}; there are {', '.join(filter(None, variants))}"
        )
    return variants[variant] if variant else next(iter(variants.values()))


def _parse(label: str) -> Stage:
    name, _, variant = label.partition("=")
    if name not in STAGES:
        raise ValueError(f"unknown stage {name!r}; there are {', '.join(STAGES)}")
    return _variant(name, variant)


def _initial(stages: Sequence[Stage]) -> frozenset[str]:
    return _ALWAYS | {
        _CARRIED[stage.name, stage.variant] for stage in stages if (stage.name, stage.variant) in _CARRIED
    }


def _orders(stages: Sequence[Stage]) -> Iterator[tuple[Stage, ...]]:
    """Return all topological orders. Among stages that may run next, those first in ``stages`` come first."""
    given = {output for stage in stages for output in stage.outputs}

    def extend(order: tuple[Stage, ...], known: frozenset[str]) -> Iterator[tuple[Stage, ...]]:
        if len(order) == len(stages):
            yield order
        for stage in stages:
            if stage not in order and (stage.inputs | (stage.joins & given)) <= known:
                yield from extend((*order, stage), known | stage.outputs)

    return extend((), _initial(stages))


def all_variants(*, reads_states: bool = False) -> list[dict[str, str]]:
    """Return every combination of stage variants as a dictionary stage -> variant, the default variants first.

    Only stages with several variants are in the dictionaries.

    Args:
        reads_states: whether the drafter needs the target's hidden states of committed tokens, so that variants which
            draft ahead of time are left out.
    """
    names = [name for name, variants in STAGES.items() if len(variants) > 1]
    every = [dict(zip(names, choice, strict=True)) for choice in product(*(STAGES[name] for name in names))]
    return [each for each in every if not reads_states or _WITH_STATES.items() <= each.items()]


def is_head_first(labels: Sequence[str]) -> bool:
    """Return whether a schedule's depth prediction reads the head draft's candidates (``depth_prediction=informed``).

    The head draft (the drafter's pass over newly committed tokens) then runs before the depth is chosen, and costs time
    even if no draft step follows. ``labels`` are ``name`` or ``name=variant`` of every stage, in launch order.

    Raises:
        ValueError: ``labels`` is not a legal schedule.
    """
    return Schedule.parse(labels).variants["depth_prediction"] == "informed"


DEFAULT_ORDER = Schedule.of({}).labels
# Runs a head draft, which may be unused, to choose the depth better.
HEAD_FIRST_ORDER = Schedule.of({"depth_prediction": "informed"}).labels
# Variants that the paper compares (figure 9 c): the serial iteration, and ahead-of-time (AoT) drafts.
_SERIAL = {"head_draft": "after", "tail_draft": "conditional", "accept": "host"}
NAMED_VARIANTS = {
    "naive": _SERIAL,
    "AoT tail": {**_SERIAL, "tail_draft": "ahead"},
    "AoT head": {**_SERIAL, "head_draft": "ahead", "tail_draft": "superset"},
    "AoT tail and head": {**_SERIAL, "head_draft": "ahead", "tail_draft": "ahead"},
}
# Variants of a draft head on the target's hidden states: the serial iteration only.
_WITH_STATES = {"head_draft": "after", "tail_draft": "superset"}
NAMED_WITH_STATES = {"naive": {**_SERIAL, **_WITH_STATES}}


def named_variants(*, reads_states: bool, is_captured: bool) -> dict[str, dict[str, str]]:
    """Return those of the schedules compared in the paper that drafter and device support: name -> stage -> variant.

    Args:
        reads_states: whether the drafter is a head on the target's hidden states, which cannot draft ahead of time.
        is_captured: whether steps are captured CUDA graphs, which accept on the device.
    """
    named = NAMED_WITH_STATES if reads_states else NAMED_VARIANTS
    return {name: {**variants, **({"accept": "device"} if is_captured else {})} for name, variants in named.items()}
