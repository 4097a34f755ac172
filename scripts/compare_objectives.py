#!/usr/bin/env python3
"""Decode with the objective latency, with AAL alone, and plainly, in turns (the paper's figure 14).

    scripts/compare_objectives.py --plan demo c4.jsonl wikipedia.jsonl cnndm.jsonl humaneval.jsonl --json out.json

One pair, one set of compiled steps, one plan's costs: only what the policy maximises differs. Both stand behind the
gate, which decodes plainly where speculation loses. Ratios are taken prompt by prompt; the median and the quartiles are
shown for each prompt file.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from yggdrasil.artifacts import current_machine, resolve_plan, write_atomic
from yggdrasil.engine.decoder import Decoder, Generation, planned_policy
from yggdrasil.engine.policy import PLAIN_POLICY, Policy
from yggdrasil.predictor.bundle import Learned
from yggdrasil.prompts import read_prompts
from yggdrasil.scheduling.plan import Plan
from yggdrasil.tree.objective import Objective

console = Console()


def main(
    files: Annotated[list[Path], typer.Argument(help="Prompt files, JSON lines with a prompt field.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")] = "demo",
    limit: Annotated[int, typer.Option(help="Prompts of each file.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 256,
    out: Annotated[Path | None, typer.Option("--json", help="Write every sample here.")] = None,
) -> None:
    """Print tokens a second of latency over AAL for each prompt file."""
    decoder = Decoder.from_plan(plan)
    policies: dict[str, Policy] = {name: _policy(plan, name) for name in ("latency", "aal")}
    policies["plain"] = PLAIN_POLICY
    table = Table("prompts", "same tokens", "AAL: latency", "AAL: aal", "latency over aal", "quartiles", "over plain")
    samples: dict[str, list[dict[str, float]]] = {}
    for file in files:
        rows = samples[file.stem] = []
        matched = 0
        for number, prompt in enumerate([None, *read_prompts(file, limit)]):
            text = (prompt or read_prompts(file, 1)[0]).prompt
            tokens = list(decoder.tokenizer(text)["input_ids"])[-max_prompt_tokens:]
            names = list(policies)
            order = names[number % 3 :] + names[: number % 3]
            runs = {name: _run(decoder, policies[name], tokens, max_new_tokens) for name in order}
            if prompt is None:  # warm-up
                continue
            matched += len({tuple(run.tokens) for run in runs.values()}) == 1
            rows.append({f"{name}_tpot_ms": run.metrics.tpot_ms for name, run in runs.items()}
                        | {f"{name}_aal": run.metrics.aal for name, run in runs.items()})  # fmt: skip
        gains = [row["aal_tpot_ms"] / row["latency_tpot_ms"] for row in rows]
        low, middle, high = statistics.quantiles(gains, n=4) if len(gains) > 1 else gains * 3
        over_plain = statistics.median(row["plain_tpot_ms"] / row["latency_tpot_ms"] for row in rows)
        lengths = [statistics.mean(row[f"{name}_aal"] for row in rows) for name in ("latency", "aal")]
        table.add_row(file.stem, f"{matched} of {len(rows)}", *(f"{each:.2f}" for each in lengths), f"{middle:.3f}",
                      f"{low:.3f} to {high:.3f}", f"{over_plain:.3f}")  # fmt: skip
    console.print(table)
    if out is not None:
        machine = current_machine().describe()
        record = {"plan": plan, "machine": machine, "max_new_tokens": max_new_tokens, "samples": samples}
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())


def _policy(plan: str, objective: Objective) -> Policy:
    """The plan's own policy with another objective."""
    path = resolve_plan(plan, current_machine())
    loaded = Plan.load(path)
    return planned_policy(replace(loaded, objective=objective), Learned.load(path.parent / loaded.predictor))


def _run(decoder: Decoder, policy: Policy, tokens: list[int], count: int) -> Generation:
    decoder.policy = policy
    return decoder.generate(tokens, max_new_tokens=count, ignore_eos=True)


if __name__ == "__main__":
    typer.run(main)
