#!/usr/bin/env python3
"""Decode with the objective latency, with AAL alone, and plainly, in turns (the paper's figure 14).

    scripts/compare_objectives.py --plan tiny c4.jsonl wikipedia.jsonl cnndm.jsonl humaneval.jsonl --json out.json

One pair, one set of compiled steps, one plan's costs, trees alone: only what the policy maximises differs. Both stand
within the budget as shipped, which decodes plainly where speculation loses and so hides most of what a bad objective
costs; with --no-budget the objective alone decides. Ratios are taken turn by turn, a prompt's is the median over
rounds, and the median and the quartiles over prompts are shown for each prompt file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from yggdrasil.artifacts import current_machine, resolve_plan, write_atomic
from yggdrasil.bench.spread import describe, spread
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.progress import wide_console
from yggdrasil.engine.decoder import Decoder, Generation
from yggdrasil.engine.plan_parts import planned_policy
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.policy.objective import Decision, Objective
from yggdrasil.policy.policy import ObjectivePolicy, Policy
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.repeats import foretold
from yggdrasil.prompts import encode_prompt, read_prompts, sets_by_name
from yggdrasil.scheduling.plan import Plan

console = Console(stderr=True)


def main(
    files: Annotated[list[Path], typer.Argument(help="Prompt files, JSON lines with a prompt field.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")] = "tiny",
    limit: Annotated[int, typer.Option(help="Prompts of each file.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 64,
    budget: Annotated[bool, typer.Option(help="Keep the budget of losses, or let the objective decide alone.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Times every prompt is decoded.")] = 3,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 256,
    out: Annotated[
        Path | None, typer.Option("--json", callback=checks.output_file, help="Write every sample here.")
    ] = None,
) -> None:
    """Print tokens a second of latency over AAL for each prompt file."""
    sets = sets_by_name(files)
    decoder = Decoder.from_plan(plan)
    policies: dict[str, Policy] = {name: _policy(plan, name, budget=budget) for name in ("latency", "aal")}
    policies["plain"] = PLAIN_POLICY
    table = Table(
        "prompts", "same tokens", "AAL: latency", "AAL: aal", "tokens/s: latency", "tokens/s: aal",
        "latency over aal (quartiles)", "over plain", "repeats",
    )  # fmt: skip
    samples: dict[str, list[dict[str, float | str]]] = {}
    summary: dict[str, dict[str, Any]] = {}
    for name, file in sets.items():
        texts = {
            prompt.id: encode_prompt(decoder.tokenizer, prompt)[-max_prompt_tokens:]
            for prompt in read_prompts(file, limit)
        }
        _turn(decoder, policies, next(iter(texts.values())), max_new_tokens, 0)  # warm-up
        turns = [(number, id_) for number in range(rounds) for id_ in texts]
        rows = samples[name] = [
            {"prompt": id_, "round": number, **_turn(decoder, policies, texts[id_], max_new_tokens, turn)}
            for turn, (number, id_) in enumerate(track(turns, name, console=console))
        ]
        found = summary[name] = _summary(pd.DataFrame(rows))
        table.add_row(name, *_cells(found))
    wide_console().print(table)
    if out is not None:
        machine = current_machine().describe()
        record = {"plan": plan, "machine": machine, "budget": budget, "max_new_tokens": max_new_tokens,
                  "rounds": rounds, "summary": summary, "samples": samples}  # fmt: skip
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())


def _turn(
    decoder: Decoder, policies: dict[str, Policy], tokens: list[int], count: int, number: int
) -> dict[str, float | str]:
    """Decode by every policy, another one first each time."""
    names = list(policies)
    shift = number % len(names)
    runs = {name: _run(decoder, policies[name], tokens, count) for name in [*names[shift:], *names[:shift]]}
    figures: dict[str, float | str] = {"same": float(len({tuple(run.tokens) for run in runs.values()}) == 1)}
    figures["repeats"] = foretold(tokens, runs["plain"].tokens) / count
    for name, run in runs.items():
        figures |= {f"{name}_tpot_ms": run.metrics.tpot_ms, f"{name}_aal": run.metrics.aal}
    return figures


def _summary(frame: pd.DataFrame) -> dict[str, Any]:
    """Figures of one prompt file."""
    by_prompt = frame["prompt"]
    gains = (frame["aal_tpot_ms"] / frame["latency_tpot_ms"]).groupby(by_prompt).median()
    over_plain = (frame["plain_tpot_ms"] / frame["latency_tpot_ms"]).groupby(by_prompt).median()
    same = frame.groupby("prompt")["same"].min()
    return {
        "matched": int(same.sum()),
        "prompts": len(same),
        "aal": {name: frame[f"{name}_aal"].mean() for name in ("latency", "aal")},
        "tokens_per_s": {
            name: 1e3 / frame[f"{name}_tpot_ms"].groupby(by_prompt).median().mean() for name in ("latency", "aal")
        },
        "latency_over_aal": spread(gains.tolist()),
        "latency_over_plain": over_plain.median(),
        "repeats": frame["repeats"].mean(),
    }


def _cells(found: dict[str, Any]) -> list[str]:
    lengths, speeds = found["aal"], found["tokens_per_s"]
    return [
        f"{found['matched']} of {found['prompts']}",
        *(f"{lengths[name]:.2f}" for name in ("latency", "aal")),
        *(f"{speeds[name]:.0f}" for name in ("latency", "aal")),
        describe(found["latency_over_aal"], 3),
        f"{found['latency_over_plain']:.3f}",
        f"{found['repeats']:.0%}",
    ]


class Unguarded(ObjectivePolicy):
    """A policy's own choice in every iteration, by the plan's costs as they are."""

    def settle(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        self._probe.observe(is_warm_plain=True)


def _policy(plan: str, objective: Objective, *, budget: bool) -> Policy:
    """The plan's own policy with another objective."""
    path = resolve_plan(plan, current_machine())
    loaded = Plan.load(path)
    learned = Learned.load(path.parent / loaded.predictor)
    kind = ObjectivePolicy if budget else Unguarded
    return planned_policy(replace(loaded, objective=objective), learned, kind, wants_model_free=False)


def _run(decoder: Decoder, policy: Policy, tokens: list[int], count: int) -> Generation:
    decoder.policy = policy
    return decoder.generate(tokens, max_new_tokens=count, ignore_eos=True)


if __name__ == "__main__":
    run_script(main, "compare_objectives")
