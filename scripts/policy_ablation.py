#!/usr/bin/env python3
"""Leave one mechanism of the run-time policy out at a time, over recorded text of real models.

    scripts/policy_ablation.py --plan smollm2 --traces traces/smollm2 --traces traces/gemma --traces traces/pair

The simulator plays the run-time policy itself (``calibration.replay``) over what ``scripts/record_traces.py`` wrote.
Iterations cost what the plan measured. A draft model, where there is one, costs a third of a plain step. Nothing is
timed. Three machines: ``steady``; ``unsteady``, which changes its speed (0.8 to 1.8 times for 250 iterations) with a
tenth of noise and a pause in one of five hundred; ``memory``, whose memory alone is 1.4 times as slow now and then.
A cell is the change of speed in percent, the mean over seeds of the machine; below zero, the mechanism helps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer

from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.calibration.measurement.passes import OVERLAP
from yggdrasil.calibration.own_text import Document, read_documents
from yggdrasil.calibration.replay import RecordedTrees, recorded_documents, replay
from yggdrasil.calibration.survival import survival_of
from yggdrasil.cli import run_script
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import least_useful_probability
from yggdrasil.policy.policy import ObjectivePolicy, Policy
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.scheduling.plan import Plan

DRAFT_SHARE = 1 / 3  # of a plain step, that a step of the draft model takes
MACHINES = ("steady", "unsteady", "memory")


@dataclass(frozen=True)
class Machine(StepCosts):
    """Costs on a machine whose speed changes; ``calm`` collects them at the speed that decides nothing."""

    kind: str = "steady"
    seed: int = 0
    spent: list[float] = field(default_factory=list)

    def iteration_ms(self, width: int, depth: int, verify_width: int) -> float:
        number = len(self.spent)
        milliseconds = super().iteration_ms(width, depth, verify_width)
        calm = milliseconds
        if self.kind == "memory":
            rows = verify_width if depth else 1
            share = self.read_share(rows)
            slowness = float(_memory(self.seed)[number % (1 << 14)])
            factor = (share * slowness**OVERLAP + 1.0 - share) ** (1.0 / OVERLAP)
            milliseconds = calm = milliseconds + self.verify_ms[rows] * (factor - 1.0)
            milliseconds *= float(_noise(self.seed)[number % (1 << 14)])
        elif self.kind == "unsteady":
            milliseconds *= float(_speeds(self.seed)[number % (1 << 14)])
        self.spent.append(calm)
        return milliseconds

    def read_share(self, rows: int) -> float:
        """Share of a pass that reads weights, to the power of ``OVERLAP``; the rest of its time computes."""
        return (self.verify_ms[1] / self.verify_ms[rows]) ** OVERLAP


_cache: dict[tuple[str, int], np.ndarray] = {}


def _cached(name: str, seed: int, make: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    if (name, seed) not in _cache:
        _cache[name, seed] = make(np.random.default_rng(seed))
    return _cache[name, seed]


def _blocks(random: np.random.Generator, values: Sequence[float], lasting: int = 250) -> np.ndarray:
    return np.repeat(random.choice(values, (1 << 14) // lasting + 1), lasting)[: 1 << 14]


def _noise(seed: int) -> np.ndarray:
    return _cached("noise", seed, lambda random: np.exp(random.normal(0.0, 0.05, 1 << 14)))


def _memory(seed: int) -> np.ndarray:
    return _cached("memory", seed, lambda random: _blocks(random, [1.0, 1.4]))


def _speeds(seed: int) -> np.ndarray:
    def make(random: np.random.Generator) -> np.ndarray:
        slow = _blocks(random, [1.0, 1.0, 0.8, 1.3, 1.8])
        return slow * np.exp(random.normal(0.0, 0.1, 1 << 14)) * np.where(random.random(1 << 14) < 0.002, 20.0, 1.0)

    return _cached("speeds", seed, make)


def usual_drafter(native: bool) -> DrafterGroup:
    """N-gram statistics of the prompt and the answer, with the scorer that serves where none was fitted."""
    drafter = StatisticsDrafter(NGramScorer.usual(with_table=False), native=native)
    return DrafterGroup([drafter])


class Play(NamedTuple):
    """Text, and trees where a draft model was recorded, to play a policy over."""

    name: str
    documents: Sequence[Document]
    costs: StepCosts
    traces: TraceSet | None
    policy: Callable[[], Policy]
    drafter: Callable[[bool], DrafterGroup] = usual_drafter  # natively or not
    native: bool = True

    def milliseconds(self, kind: str, seed: int) -> float:
        """What the text takes, pauses and changes of speed left out."""
        given = {each.name: getattr(self.costs, each.name) for each in fields(StepCosts)}
        costs = Machine(**given, kind=kind, seed=seed)
        drafter = self.drafter(self.native)
        for each in drafter.drafters:
            if isinstance(each, StatisticsDrafter):
                each.leave_out_below(least_useful_probability([self.costs]))
        trees = None if self.traces is None else RecordedTrees(self.traces, self.costs, drafter)
        replay(self.documents, self.policy(), costs, trees=trees, model_free=drafter)
        return sum(costs.spent)


def plays_of(folder: Path, costs: StepCosts) -> list[Play]:
    """What is played of one folder of traces: model-free drafts, and a draft model's trees with them."""
    documents = read_documents(folder / "documents.jsonl")

    def alone() -> Policy:
        return ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None)

    plays = [Play(folder.name, documents, costs, None, alone)]
    if not (folder / "trees.safetensors").exists():
        return plays
    traces = TraceSet.load(folder / "trees.safetensors")
    draft_ms = costs.plain_ms * DRAFT_SHARE
    paired = StepCosts(
        draft_ms, dict.fromkeys(traces.widths, draft_ms), dict(costs.verify_ms), costs.overhead_ms, costs.plain_ms
    )
    numbers = np.unique(traces.document)
    prompts = {int(number): documents[int(number)].prompt for number in numbers}
    known, held_out = traces.select(numbers[::2]), traces.select(numbers[1::2])
    learned = survival_of(known, paired, usual_drafter(True), prompts)
    ratios = {width: table.astype(np.float32) for width, table in learned.ratios.items()}
    mean = learned.mean.astype(np.float32)

    def drafting() -> Policy:
        return ObjectivePolicy({0: paired}, ratios, mean, None, added_tokens=learned.added_tokens)

    return [*plays, Play(f"{folder.name}, drafted", recorded_documents(held_out, prompts), paired, held_out, drafting)]


# What is left out: attributes of the package by their path, and what stands there instead.
ABLATIONS: dict[str, dict[str, Any]] = {
    "latency scales": {"policy.costs:LatencyScales.observe": lambda *args, **options: None},
    "the latency scale of each kind": {"policy.costs:LatencyScales.OWN_RATE": 0.0},
    "acceptance correction of model-free drafts": {
        "policy.acceptance:AcceptanceCorrection.observe": lambda self, estimated, accepted: None
    },
    "survival correction of drafted trees": {
        "policy.acceptance:SurvivalCorrection.corrected": lambda self, survival: survival
    },
    "lift instead of a typical tree": {
        "policy.acceptance:DraftedTrees.typically": lambda self, here, model_free: self._typical[here]
    },
    "forced probe of plain steps": {"policy.regret:PlainProbe.is_due": lambda self, step: False},
    "regret budget": {"policy.regret:RegretBudget._add": lambda self, gained: None},
}


@contextmanager
def left_out(changes: dict[str, Any]) -> Iterator[None]:
    """Decode without a mechanism for a while."""
    with ExitStack() as stack:
        for path, value in changes.items():
            module, _, name = path.partition(":")
            holder: Any = import_module(f"yggdrasil.{module}")
            *outer, last = name.split(".")
            for part in outer:
                holder = getattr(holder, part)
            stack.enter_context(patch.object(holder, last, value))
        yield


def main(
    plan: Annotated[str, typer.Option(help="The plan whose measured costs iterations have.")],
    traces: Annotated[list[Path], typer.Option(help="A folder that scripts/record_traces.py wrote; repeat it.")],
    seeds: Annotated[int, typer.Option(min=1, help="Courses of a machine that changes its speed.")] = 4,
) -> None:
    """Print the table as Markdown."""
    costs = Plan.load(resolve_plan(plan, current_machine())).costs[0].steps()
    plays = [play for folder in traces for play in plays_of(folder, costs)]
    courses = [(kind, seed) for kind in MACHINES for seed in range(1 if kind == "steady" else seeds)]
    usual = {(play.name, *course): play.milliseconds(*course) for play in plays for course in courses}
    columns = [f"{play.name}: {kind}" for play in plays for kind in MACHINES]
    print("| left out | " + " | ".join(columns) + " |\n|" + " --- |" * (1 + len(columns)))
    tokens = {play.name: sum(len(each.answer) - 1 for each in play.documents) for play in plays}
    speeds = [
        np.mean([costs.plain_ms * tokens[play.name] / usual[play.name, kind, seed] for k, seed in courses if k == kind])
        for play in plays
        for kind in MACHINES
    ]
    print("| nothing (times plain decoding) | " + " | ".join(f"{speed:.3f}" for speed in speeds) + " |", flush=True)
    for name, changes in ABLATIONS.items():
        with left_out(changes):
            without = {(play.name, *course): play.milliseconds(*course) for play in plays for course in courses}
        cells = [
            np.mean([
                100 * (usual[play.name, kind, seed] / without[play.name, kind, seed] - 1)
                for k, seed in courses if k == kind
            ])
            for play in plays for kind in MACHINES
        ]  # fmt: skip
        print(f"| {name} | " + " | ".join(f"{cell:+.1f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    run_script(main, "policy_ablation")
