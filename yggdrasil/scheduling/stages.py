"""The stages of an iteration (paper section 5): what each takes, gives and occupies, and the orders that are legal.

An iteration is a graph. Which stage waits for which follows from inputs and outputs alone, so a ``Schedule`` that
breaks a dependency cannot be built. Variants of a stage break dependencies by computing a superset ahead of time, or by
deciding one iteration late; what they hand to the next iteration is there when that one begins. Imports no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

Resource = Literal["host", "target", "drafter"]  # the host's thread, and one device stream a model


class Stage(NamedTuple):
    """One step of an iteration in one of its variants."""

    name: str
    variant: str  # empty where there is only one
    resource: Resource
    inputs: frozenset[str]  # values that must exist before it runs
    outputs: frozenset[str]
    joins: frozenset[str] = frozenset()  # inputs that it takes only where some stage of the schedule gives them

    @property
    def label(self) -> str:
        """How a plan writes it: ``name`` or ``name=variant``."""
        return f"{self.name}={self.variant}" if self.variant else self.name


def _stage(name: str, resource: Resource, inputs: str, outputs: str, joins: str = "") -> Stage:
    name, _, variant = name.partition("=")
    return Stage(name, variant, resource, *(frozenset(text.split()) for text in (inputs, outputs, joins)))


_ALL = (
    _stage("depth_prediction=now", "host", "hidden", "shape drafts"),
    _stage("depth_prediction=informed", "host", "hidden root", "shape"),  # by the drafter's first guesses too
    _stage("depth_prediction=late", "host", "hidden", "next_shape"),
    _stage("head_draft=after", "drafter", "certain", "root", joins="drafts"),  # of one size whatever the shape
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
# Stage -> variant -> stage; the first variant is what a stage is where nothing is said.
STAGES: dict[str, dict[str, Stage]] = {}
for _one in _ALL:
    STAGES.setdefault(_one.name, {})[_one.variant] = _one
# What an iteration begins with: always the text and the state behind it, and what a variant handed over.
_ALWAYS = frozenset({"certain", "hidden"})
_CARRIED = {
    ("depth_prediction", "late"): "shape",
    ("head_draft", "ahead"): "root",
    ("bookkeeping", "overlapped"): "previous_emission",
}


@dataclass(frozen=True)
class Schedule:
    """Every stage once, in the order in which they are launched.

    Raises:
        ValueError: naming the fault: an unknown, missing or repeated stage, or one that runs before its inputs exist.
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
        """Read a schedule from ``labels``; a name without a variant means the stage's first one."""
        return cls(tuple(_parse(label) for label in labels))

    @classmethod
    def of(cls, variants: Mapping[str, str]) -> "Schedule":
        """The schedule with these variants in which every stage is launched as early as its inputs allow."""
        wanted = [_variant(name, variants.get(name, "")) for name in STAGES]
        return cls(next(_orders(wanted)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The stages' names, in order."""
        return tuple(stage.name for stage in self.stages)

    @property
    def labels(self) -> tuple[str, ...]:
        """The stages as a plan writes them."""
        return tuple(stage.label for stage in self.stages)

    @cached_property
    def variants(self) -> dict[str, str]:
        """Variant of each stage that has several."""
        return {stage.name: stage.variant for stage in self.stages if stage.variant}

    @property
    def initial(self) -> frozenset[str]:
        """Values that exist when an iteration begins."""
        return _initial(self.stages)

    @cached_property
    def predecessors(self) -> dict[str, frozenset[str]]:
        """For each stage the stages whose outputs it takes."""
        giver = {output: stage.name for stage in self.stages for output in stage.outputs}
        return {
            stage.name: frozenset(giver[value] for value in stage.inputs | stage.joins if value in giver)
            for stage in self.stages
        }

    def orders(self) -> Iterator["Schedule"]:
        """Every legal order of the same variants, the earliest-first one first."""
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
    """All topological orders; among stages that may run next the first of ``stages`` goes first."""
    given = {output for stage in stages for output in stage.outputs}

    def extend(order: tuple[Stage, ...], known: frozenset[str]) -> Iterator[tuple[Stage, ...]]:
        if len(order) == len(stages):
            yield order
        for stage in stages:
            if stage not in order and (stage.inputs | (stage.joins & given)) <= known:
                yield from extend((*order, stage), known | stage.outputs)

    return extend((), _initial(stages))


def all_variants(*, reads_states: bool = False) -> list[dict[str, str]]:
    """Every combination of variants, today's defaults first.

    ``reads_states``: the drafter reads what is certain with the target's states, so never before it is.
    """
    names = [name for name, variants in STAGES.items() if len(variants) > 1]
    every = [dict(zip(names, choice, strict=True)) for choice in product(*(STAGES[name] for name in names))]
    return [each for each in every if not reads_states or _WITH_STATES.items() <= each.items()]


def check_order(labels: Sequence[str]) -> None:
    """Raise ValueError naming the fault unless ``labels`` is a legal schedule."""
    Schedule.parse(labels)


def is_head_first(labels: Sequence[str]) -> bool:
    """Whether the depth is chosen after the head draft."""
    return Schedule.parse(labels).variants["depth_prediction"] == "informed"


DEFAULT_ORDER = Schedule.of({}).labels
# A head draft is risked for a better choice of the depth.
HEAD_FIRST_ORDER = Schedule.of({"depth_prediction": "informed"}).labels
# The plans that the paper compares (figure 9 c): today's serial iteration, and what may run ahead of time.
_SERIAL = {"head_draft": "after", "tail_draft": "conditional", "accept": "host"}
NAMED_VARIANTS = {
    "naive": _SERIAL,
    "AoT tail": {**_SERIAL, "tail_draft": "ahead"},
    "AoT head": {**_SERIAL, "head_draft": "ahead", "tail_draft": "superset"},
    "AoT tail and head": {**_SERIAL, "head_draft": "ahead", "tail_draft": "ahead"},
}
# What a head on the target's states can be: the serial iteration, and nothing ahead of time.
_WITH_STATES = {"head_draft": "after", "tail_draft": "superset"}
NAMED_WITH_STATES = {"naive": {**_SERIAL, **_WITH_STATES}}
