#!/usr/bin/env python3
"""Halve and double every tuned number, and see what decoding gives: the run-time policy played over recorded text.

    scripts/tuned_numbers.py --counts smollm2 --pair tiny --page docs/tuned-numbers.md

Nothing is timed: iterations cost what the plans say, on a machine that changes its speed and stands still now and then,
the same way for all. What is shown is the change of the speed, at what iterations cost without that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.progress import track
from tuned import NOT_PLAYED, TUNED, Tuned, changed

from yggdrasil.artifacts import current_machine, resolve_plan, write_atomic
from yggdrasil.calibration.own_text import Document, read_documents, text_file
from yggdrasil.calibration.record import concatenate, record_document
from yggdrasil.calibration.replay import RecordedTrees, recorded_documents, replay
from yggdrasil.cli import run_script
from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.counts import BELIEF_FILE, CountsDrafter
from yggdrasil.drafters.group import DrafterGroup
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.table import Table
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.planned import planned_policy
from yggdrasil.engine.policy import PLAIN_POLICY, Policy
from yggdrasil.errors import YggdrasilError
from yggdrasil.predictor.bundle import Learned
from yggdrasil.pretrained import shipped_prompts
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.scheduling.plan import Plan
from yggdrasil.scheduling.stages import is_head_first
from yggdrasil.tree.objective import least_useful
from yggdrasil.tree.step_costs import StepCosts

ANSWERED, LONGEST_PROMPT = 48, 128  # tokens of a pair's text
OF_A_PAIR = """;
- pair: recorded trees of the plan `{pair}` with the text's counts, {limit} answers; half of it wrong: without counts,
  where nothing stands that is drafted for every second answer"""
INTRODUCTION = """# Tuned numbers

All numbers that decoding decides by (`yggdrasil/engine`, `yggdrasil/drafters`, `yggdrasil/tree`) and that could be
others. What a calibration measures or fits is not among them. `scripts/tuned_numbers.py` writes this page, and a test
compares it with the code.

Each is halved and doubled (of a share near one: what is left of it), and the run-time policy plays recorded text again
(`yggdrasil/calibration/replay.py`). Cells: percent of speed, half / twice; above zero is faster.

- counts: the target's own text with the counts of the plan `{counts}`, of whose table the text is no part; look-up: the
  same text, {limit} answers, with the n-gram look-up alone{pair}.

Iterations cost what the plans say, on a machine that changes its speed (0.8 to 1.8 times for 250 iterations), with a
tenth of noise and a pause of twenty times in one of five hundred. No two runs meet it at the same places of the text,
so a few tenths of a percent say nothing.

"""


@dataclass(frozen=True)
class UnsteadyCosts(StepCosts):
    """Costs on a machine whose speed changes; the same for all who ask so often."""

    calm: list[float] = field(default_factory=list)  # what was asked for, at the calibrated speed

    def iteration_ms(self, width: int, depth: int, verify_width: int) -> float:
        self.calm.append(super().iteration_ms(width, depth, verify_width))
        return self.calm[-1] * float(_SPEED[len(self.calm) % len(_SPEED)])


def _speeds(count: int = 1 << 16, lasting: int = 250) -> np.ndarray:
    """Of each iteration: a factor for a while, a tenth of noise, and one pause in five hundred."""
    generator = np.random.default_rng(0)
    slow = np.repeat(generator.choice([1.0, 1.0, 0.8, 1.3, 1.8], count // lasting + 1), lasting)[:count]
    return slow * np.exp(generator.normal(0.0, 0.1, count)) * np.where(generator.random(count) < 0.002, 20.0, 1.0)


_SPEED = _speeds()


class Play(NamedTuple):
    """Text and trees to play a policy over."""

    documents: Sequence[Document]
    costs: StepCosts
    policy: Callable[[], Policy]
    free: Callable[[bool], DrafterGroup | None]  # natively or not
    traces: TraceSet | None = None
    is_head_first: bool = False

    def speed(self, *, native: bool = True) -> float:
        """Times plain decoding."""
        costs = UnsteadyCosts(**{each.name: getattr(self.costs, each.name) for each in fields(StepCosts)})
        free = self.free(native)
        trees = None if self.traces is None else RecordedTrees(self.traces, self.costs, free)
        result = replay(self.documents, self.policy(), costs, trees=trees, free=free, is_head_first=self.is_head_first)
        return self.costs.plain_ms * result.tokens / sum(costs.calm)


def plays_of_counts(name: str, limit: int) -> dict[str, Play]:
    """Guesses without a pass, over the target's own text that the plan's table was counted in, each apart from it."""
    plan, folder = _plan(name)
    documents = read_documents(text_file(plan.target.fingerprint, plan.target.weights))
    if len(documents) < 10 * limit:
        raise YggdrasilError(
            f"the target of {name} has written {len(documents)} texts, too few to play {limit} of them"
        )
    every = len(documents) // limit
    played, rest = documents[::every][:limit], [each for i, each in enumerate(documents) if i % every]
    belief, table, costs = Belief.load(folder / BELIEF_FILE), Table.of(rest).without_rare(), plan.costs[0].steps()

    def counts(native: bool) -> DrafterGroup:
        drafter = CountsDrafter(belief, table, native=native)
        drafter.leave_out_below(least_useful([costs]))
        return DrafterGroup([drafter])

    def policy() -> Policy:
        return planned_policy(plan, None, drafts=False)

    return {
        "counts": Play(played, costs, policy, counts),
        "look-up": Play(played, costs, policy, lambda native: DrafterGroup([NGramDrafter()])),
    }


def plays_of_a_pair(name: str, prompts: Path | None, limit: int) -> dict[str, Play]:
    """A draft model's trees with the text's counts, and without them where every second answer is guessed wrong."""
    plan, folder = _plan(name)
    learned, decoder = Learned.load(folder), Decoder.from_plan(name, backend="eager", force_machine=True)
    decoder.policy, drafter = PLAIN_POLICY, decoder.assembly.engine.drafter
    if drafter is None:
        raise YggdrasilError(f"the plan {name} has no draft model")
    asked, _ = shipped_prompts(plan.target.path()) if prompts is None else (prompts, False)
    texts = [encode_prompt(decoder.tokenizer, each)[-LONGEST_PROMPT:] for each in read_prompts(asked, limit)]
    parts = []
    for number, text in enumerate(track(texts, "recording")):
        tokens = decoder.generate(text, max_new_tokens=ANSWERED + plan.shapes.max_depth, ignore_eos=True).tokens
        parts.append(record_document(decoder.assembly, drafter, text, tokens, number))
    traces, costs = concatenate(parts), plan.costs[0].steps()
    is_wrong = (traces.document % 2 == 1)[:, None]
    wrong = replace(traces, token={width: tokens + is_wrong for width, tokens in traces.token.items()})
    play = Play(
        recorded_documents(traces, dict(enumerate(texts))),
        costs,
        lambda: planned_policy(plan, learned),
        lambda native: DrafterGroup([CountsDrafter(Belief.usual(with_table=False), native=native)]),
        traces,
        is_head_first(plan.stages),
    )
    return {"pair": play, "half of it wrong": play._replace(traces=wrong, free=lambda native: None)}


def _plan(name: str) -> tuple[Plan, Path]:
    """A plan and the folder of what was learned."""
    path = resolve_plan(name, current_machine())
    plan = Plan.load(path)
    return plan, path.parent / plan.predictor


def effects(tuned: Tuned, plays: dict[str, Play], usual: dict[str, float]) -> list[str]:
    """Of half and of twice as much, in percent of the speed, in each play."""
    cells = []
    for name, play in plays.items():
        if (tuned.module == "drafters.ngram") != (name == "look-up"):
            cells.append("–")
            continue
        speeds = []
        for factor in (0.5, 2.0):
            with changed(tuned, factor):
                speeds.append(play.speed(native=tuned.module != "drafters.counted"))
        cells.append(" / ".join(f"{100 * (speed / usual[name] - 1):+.1f}" for speed in speeds))
    return cells


def main(
    counts: Annotated[str, typer.Option(help="A plan without a draft model, whose target's own text is there.")],
    page: Annotated[Path, typer.Option(help="Where the page is written.")],
    pair: Annotated[str | None, typer.Option(help="A plan with a draft model.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="For the pair; else those it was calibrated with.")] = None,
    limit: Annotated[int, typer.Option(min=20, help="Texts that are played, a tenth as many of the pair.")] = 200,
) -> None:
    """Write the page of tuned numbers."""
    plays = plays_of_counts(counts, limit)
    if pair is not None:
        plays |= plays_of_a_pair(pair, prompts, limit // 10)
    usual = {name: play.speed() for name, play in plays.items()}
    rows = [
        [f"`{each.name}`", f"{each.value:g}", f"`yggdrasil/{each.module.replace('.', '/')}.py`", each.meaning,
         *effects(each, plays, usual)]
        for each in track(TUNED, "playing")
    ]  # fmt: skip
    first = ["as they are", "", "", "times plain decoding", *(f"{speed:.3f}" for speed in usual.values())]
    write_atomic(page, _page([first, *rows], list(plays), limit, counts, pair).encode())


def _page(rows: Sequence[Sequence[str]], plays: Sequence[str], limit: int, counts: str, pair: str | None) -> str:
    head = ["number", "value", "file", "what it is", *plays]
    table = [head, ["---"] * len(head), *rows]
    others = [
        f"| `{name}` | `yggdrasil/{module.replace('.', '/')}.py` | {why} |"
        for module, names in NOT_PLAYED.items()
        for name, why in names.items()
    ]
    of_a_pair = "" if pair is None else OF_A_PAIR.format(pair=_plan(pair)[0].name, limit=limit // 10)
    return INTRODUCTION.format(counts=counts, limit=limit, pair=of_a_pair) + "\n".join(
        [*("| " + " | ".join(row) + " |" for row in table), "", "Other numbers of these packages:", "",
         "| number | file | why it is not played |", "|---|---|---|", *others, ""]
    )  # fmt: skip


if __name__ == "__main__":
    run_script(main, "tuned_numbers")
