"""The stages of an iteration by name, what each needs and what it gives. Pure Python: imports no torch.

A plan lists stages in the order in which they run; an order in which a stage runs before what it needs is refused.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """One step of an iteration."""

    name: str
    needs: frozenset[str]  # values that must exist before it runs
    gives: frozenset[str]


def _stage(name: str, needs: str, gives: str) -> Stage:
    return Stage(name, frozenset(needs.split()), frozenset(gives.split()))


# Certain at the start of an iteration: the text so far and the target's hidden state at its end.
INITIAL = frozenset({"text", "hidden"})

STAGES = {
    stage.name: stage
    for stage in (
        _stage("depth_prediction", "hidden", "shape"),
        _stage("head_draft", "text", "root"),  # of the same size whatever the shape
        _stage("draft_steps", "root shape", "tree"),
        _stage("prune", "tree", "order verify_width"),
        _stage("verify", "order verify_width", "choices"),
        _stage("accept", "choices", "accepted"),
        _stage("commit", "accepted", "cache"),
        _stage("bookkeeping", "accepted cache", "emitted"),
    )
}
DEFAULT_ORDER = tuple(STAGES)
# The depth is chosen with the drafter's first guesses known: a head draft is risked for a better choice.
HEAD_FIRST_ORDER = ("head_draft", "depth_prediction", *DEFAULT_ORDER[2:])


def is_head_first(names: Sequence[str]) -> bool:
    """Whether the head draft runs before the depth is chosen."""
    return list(names).index("head_draft") < list(names).index("depth_prediction")


def check_order(names: Sequence[str]) -> None:
    """Raise ValueError naming the fault unless ``names`` holds every stage once, each after what it needs."""
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise ValueError(f"unknown stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    missing = [name for name in STAGES if name not in names]
    if missing:
        raise ValueError(f"the stage {missing[0]!r} is missing")
    known = set(INITIAL)
    for name in names:
        stage = STAGES[name]
        if len(names) != len(set(names)):
            raise ValueError("a stage is listed twice")
        lacking = stage.needs - known
        if lacking:
            raise ValueError(f"the stage {name!r} runs before {', '.join(sorted(lacking))} exists")
        known |= stage.gives
