#!/usr/bin/env python3
"""Leave one mechanism of the run-time policy out at a time, over recorded text of real models.

    scripts/policy_ablation.py smollm2.yaml=traces/smollm2 gemma.yaml=traces/gemma ...

The simulator plays the run-time policy itself (``calibration.replay``) over what ``scripts/record_traces.py`` wrote.
Iterations cost what the plan measured. A draft model, where there is one, costs a third of a plain step. Nothing is
timed. Machines: ``steady``; ``unsteady``, which changes its speed (0.8 to 1.8 times for 250 iterations); ``memory``,
whose memory alone is 1.35 times as slow in half of the blocks of 300 iterations, and which was measured in the other
state than the one it begins in. The last two have a twentieth of noise, a pause in one of three hundred iterations, and
widths that were measured with an error of six percent. With ``--altered``, a share of the tokens of each answer is
another one, so that drafts are accepted less than their scores say. A folder of traces may hold ``scorer.safetensors``
and ``table.safetensors``, as a first use makes them.

A cell has the speed over plain decoding on the same machine, the prompts that were more than 2 % slower than plain, and
the worst prompt; below, what leaving a mechanism out changes: percent of speed, and prompts that are slower.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer

from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.calibration.measurement.costs import OVERLAP
from yggdrasil.calibration.own_text import Document, read_documents
from yggdrasil.calibration.replay import RecordedTrees, recorded_documents, replay
from yggdrasil.calibration.survival import survival_of
from yggdrasil.cli import run_script
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.drafters.statistics.drafter import SCORER_FILE, TABLE_FILE, StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.policy.costs import StepCosts, lower_envelope
from yggdrasil.policy.fixed import Policy
from yggdrasil.policy.objective import Decision, least_useful_probability
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.scheduling.plan import Plan

DRAFT_SHARE = 1 / 3  # of a plain step, that a step of the draft model takes
MACHINES = ("steady", "unsteady", "memory")
SLOW = 1.35  # times a plain step, where the memory is slow
LIMIT = 1.02  # times plain decoding, above which a prompt counts as slower


@dataclass(frozen=True)
class Machine(StepCosts):
    """Costs on a machine whose speed changes.

    ``calm`` collects the milliseconds of each iteration without noise and pauses, ``plain`` those of a plain step then.
    """

    kind: str = "steady"
    seed: int = 0
    calm: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, costs: StepCosts, kind: str, seed: int) -> "Machine":
        return cls(**{each.name: getattr(costs, each.name) for each in fields(StepCosts)}, kind=kind, seed=seed)

    def iteration_ms(self, width: int, depth: int, verify_width: int) -> float:
        number = len(self.calm) % (1 << 14)
        memory, speed, noise = (each[number] for each in _course(self.kind, self.seed))
        rest = super().iteration_ms(width, depth, verify_width) - self.verify_ms[verify_width if depth else 1]
        pass_ms = self.pass_ms(verify_width if depth else 1, memory)
        self.calm.append(speed * (rest + pass_ms))
        self.plain.append(speed * (self.plain_ms + (memory - 1.0) * self.verify_ms[1]))
        return self.calm[-1] * noise

    def pass_ms(self, rows: int, memory: float) -> float:
        """Return the time of a pass with reading ``memory`` times as slow as measured, and arithmetic as fast."""
        reading = self.verify_ms[1]
        computing = self.verify_ms[rows] ** OVERLAP - reading**OVERLAP
        return float(((memory * reading) ** OVERLAP + computing) ** (1.0 / OVERLAP))

    def measured(self) -> StepCosts:
        """Return the costs that a calibration of this machine records."""
        memory, error = 1.0, np.zeros(len(self.verify_ms))
        if self.kind != "steady":
            error = np.random.default_rng(1000 + self.seed).normal(0.0, 0.06, len(self.verify_ms))
        if self.kind == "memory" and self.seed % 2 == 0:
            memory = SLOW
        timed = {
            width: self.pass_ms(width, memory) * float(np.exp(off))
            for width, off in zip(self.verify_widths, error, strict=True)
        }
        verify_ms = {width: ms for width, (ms, _) in lower_envelope(timed).items()}
        plain_ms = self.plain_ms - self.verify_ms[1] + timed[1]
        given = {each.name: getattr(self, each.name) for each in fields(StepCosts)}
        return StepCosts(**{**given, "verify_ms": verify_ms, "plain_ms": plain_ms})


@cache
def _course(kind: str, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Return the factors on memory, on all, and the noise, of each iteration."""
    random, count = np.random.default_rng(seed), 1 << 14
    memory, speed, noise = np.ones(count), np.ones(count), np.ones(count)
    if kind == "memory":
        blocks = random.choice([1.0, SLOW], count // 300 + 1)
        blocks[0] = 1.0 if seed % 2 == 0 else SLOW
        memory = np.repeat(blocks, 300)[:count]
    elif kind == "unsteady":
        speed = np.repeat(random.choice([1.0, 1.0, 0.8, 1.3, 1.8], count // 250 + 1), 250)[:count]
    if kind != "steady":
        noise = np.exp(random.normal(0.0, 0.05, count)) * np.where(random.random(count) < 1 / 300, 3.0, 1.0)
    return memory.tolist(), speed.tolist(), noise.tolist()


class Watched:
    """A policy whose requests are noted: the milliseconds of each, and those of plain decoding on the same machine."""

    def __init__(self, policy: Policy, machine: Machine) -> None:
        self._policy, self._machine = policy, machine
        self.requests: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def begin(self) -> None:
        self.requests.append((0.0, 0.0))
        self._policy.begin()

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        taken, plain = self.requests[-1]
        self.requests[-1] = taken + self._machine.calm[-1], plain + tokens * self._machine.plain[-1]
        self._policy.observe(decision, tokens, milliseconds)


def usual_drafter(folder: Path = Path()) -> DrafterGroup:
    """N-gram statistics with the scorer and the table in ``folder``; without them, of prompt and answer alone."""
    scorer, table = folder / SCORER_FILE, folder / TABLE_FILE
    drafter = StatisticsDrafter(
        NGramScorer.load(scorer) if scorer.exists() else NGramScorer.default(with_table=False),
        Table.load(table) if table.exists() else None,
    )
    return DrafterGroup([drafter])


class Result(NamedTuple):
    """The result of one course of a machine, or the mean of several."""

    speed: float  # times plain decoding
    slower: float  # prompts
    worst: float  # speed of the slowest prompt

    @classmethod
    def of(cls, requests: Sequence[tuple[float, float]]) -> "Result":
        taken, plain = np.array(requests).T
        speeds = plain / taken
        return cls(float(plain.sum() / taken.sum()), float((speeds < 1.0 / LIMIT).sum()), float(speeds.min()))

    @classmethod
    def mean(cls, results: Sequence["Result"]) -> "Result":
        return cls(*np.mean(results, axis=0).tolist())


class Play(NamedTuple):
    """Text, and trees where a draft model was recorded, to play a policy over."""

    name: str
    documents: Sequence[Document]
    costs: StepCosts
    traces: TraceSet | None
    policy: Callable[[StepCosts], Policy]  # for measured costs
    drafter: Callable[[], DrafterGroup] = usual_drafter

    def result(self, kind: str, seed: int) -> Result:
        """Play the policy over the text on one machine."""
        machine = Machine.of(self.costs, kind, seed)
        drafter = self.drafter()
        for each in drafter.drafters:
            if isinstance(each, StatisticsDrafter):
                each.leave_out_below(least_useful_probability([self.costs]))
        trees = None if self.traces is None else RecordedTrees(self.traces, self.costs, drafter)
        policy = Watched(self.policy(machine.measured()), machine)
        replay(self.documents, policy, machine, trees=trees, model_free=drafter)
        return Result.of(policy.requests)


def altered(document: Document, share: float, tokens: Sequence[int]) -> Document:
    """Replace a ``share`` of the answer's tokens by others of ``tokens``."""
    random = np.random.default_rng(len(document.answer))
    others = random.choice(tokens, len(document.answer))
    is_other = random.random(len(document.answer)) < share
    return document._replace(answer=np.where(is_other, others, document.answer).tolist())


def plays_of(folder: Path, costs: StepCosts) -> list[Play]:
    """What is played of one folder of traces: model-free drafts, and a draft model's trees with them."""
    documents = read_documents(folder / "documents.jsonl")

    def alone(measured: StepCosts) -> Policy:
        return ObjectivePolicy({0: measured}, {}, np.empty(0, dtype=np.float32), None)

    drafter = partial(usual_drafter, folder=folder)
    plays = [Play(folder.name, documents, costs, None, alone, drafter)]
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
    learned = survival_of(known, paired, drafter(), prompts)
    ratios = {width: table.astype(np.float32) for width, table in learned.ratios.items()}
    mean = learned.mean.astype(np.float32)

    def drafting(measured: StepCosts) -> Policy:
        return ObjectivePolicy({0: measured}, ratios, mean, None, added_tokens=learned.added_tokens)

    return [
        *plays,
        Play(f"{folder.name}, drafted", recorded_documents(held_out, prompts), paired, held_out, drafting, drafter),
    ]


# What is left out: attributes of the package by their path, and what stands there instead.
ABLATIONS: dict[str, dict[str, Any]] = {
    "latency scales": {"policy.policy:LatencyScales.observe": lambda *args, **options: None},
    "each step's own factor": {"policy.policy:LatencyScales.OWN_RATE": 0.0},
    "limit of a pause": {"policy.policy:LatencyScales.PAUSE": 1e9},
    "acceptance correction of model-free drafts": {
        "policy.policy:AcceptanceCorrection.observe": lambda self, estimated, accepted: None
    },
    "tokens that drafting adds, a typical tree instead": {
        "policy.objective:DraftedTrees.typical": lambda self, here, model_free, correction=1.0: self._typical[here]
    },
    "regret budget": {"policy.policy:RegretBudget._add": lambda self, gained: None},
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
    plays: Annotated[list[str], typer.Argument(help="PLAN=FOLDER: costs, and traces of scripts/record_traces.py.")],
    seeds: Annotated[int, typer.Option(min=1, help="Courses of a machine that changes its speed.")] = 4,
    share: Annotated[float, typer.Option("--altered", min=0.0, max=1.0, help="Share of tokens to replace.")] = 0.0,
    leave_out: Annotated[bool, typer.Option(help="Leave mechanisms out, or show the policy as it is alone.")] = True,
) -> None:
    """Print the tables as Markdown."""
    played = [play for each in plays for play in _plays_of(*each.split("=", 1), share)]
    columns = [(play, kind) for play in played for kind in MACHINES]
    usual = [_mean(*column, seeds) for column in columns]
    print("| speed, slower prompts, worst | " + " | ".join(MACHINES) + " |\n|" + " --- |" * (1 + len(MACHINES)))
    for start in range(0, len(usual), len(MACHINES)):
        cells = [f"{each.speed:.3f}, {each.slower:.2f}, {each.worst:.2f}" for each in usual[start:][: len(MACHINES)]]
        play = columns[start][0]
        print(f"| {play.name} ({len(play.documents)} prompts) | " + " | ".join(cells) + " |", flush=True)
    if not leave_out:
        return
    names = [f"{play.name}: {kind}" for play, kind in columns]
    print("\n| left out | " + " | ".join(names) + " |\n|" + " --- |" * (1 + len(names)))
    for name, changes in ABLATIONS.items():
        with left_out(changes):
            without = [_mean(*column, seeds) for column in columns]
        cells = [
            f"{100 * (other.speed / each.speed - 1):+.1f} ({other.slower - each.slower:+.1f})"
            for each, other in zip(usual, without, strict=True)
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def _plays_of(plan: str, folder: str, share: float) -> list[Play]:
    costs = Plan.load(resolve_plan(plan, current_machine())).costs[0].steps()
    plays = plays_of(Path(folder), costs)
    if not share:
        return plays
    tokens = [token for document in plays[0].documents for token in document.answer]
    return [plays[0]._replace(documents=[altered(each, share, tokens) for each in plays[0].documents])]


def _mean(play: Play, kind: str, seeds: int) -> Result:
    return Result.mean([play.result(kind, seed) for seed in range(1 if kind == "steady" else seeds)])


if __name__ == "__main__":
    run_script(main, "policy_ablation")
