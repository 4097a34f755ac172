#!/usr/bin/env python3
"""Compare speculative output in float32 with our plain loop under the same seed, token for token, at several settings.

    scripts/check_sampling.py --prompts prompts.jsonl --limit 100 --max-new-tokens 128 --json out.json

Ways of drafting: the plan's Equal-Growth Trees, a chain, a k-ary tree, none. At temperature 0 the reference is
transformers' own ``generate``. Exit code 1 if any token differs.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import OFF, Speculation
from yggdrasil.artifacts import write_atomic
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.prompts import read_prompts
from yggdrasil.tree.objective import TreeShape

SETTINGS = {
    "T=0": SamplingParams(),
    "T=0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=7),
    "T=1": SamplingParams(temperature=1.0, seed=11),
    "T=1.5, min-p 0.05": SamplingParams(temperature=1.5, min_p=0.05, seed=13),
}
WAYS = {
    "EGT": Speculation(),
    "chain": Speculation(expansion=(1, 1, 1)),
    "k-ary": Speculation(expansion=(2, 2, 1)),
    "off": OFF,
}


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt field.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")] = "demo",
    limit: Annotated[int, typer.Option(help="Prompts to compare.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 128,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 256,
    force_machine: Annotated[bool, typer.Option("--force-machine", help="Use another machine's plan.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the counts here.")] = None,
) -> None:
    """Print, for each setting and way of drafting, how many prompts match."""
    decoder = Decoder.from_plan(plan, dtype="float32", force_machine=force_machine)
    assert decoder.plan is not None
    # The plan's own gate may decode plainly throughout; a fixed shape speculates at every step.
    decoder.policy = FixedPolicy(TreeShape(2, 3, 8))
    reference = AutoModelForCausalLM.from_pretrained(decoder.plan.target.path(), dtype=torch.float32)
    matched = {setting: dict.fromkeys(WAYS, 0) for setting in SETTINGS}
    accepted = {setting: dict.fromkeys(WAYS, 0) for setting in SETTINGS}
    requests = read_prompts(prompts, limit)
    for prompt in track(requests, console=Console(stderr=True), description="prompts"):
        tokens = list(decoder.tokenizer(prompt.prompt)["input_ids"])[-max_prompt_tokens:]
        for setting, sampling in SETTINGS.items():
            if sampling.is_greedy:
                inputs = torch.tensor([tokens])
                output = reference.generate(
                    inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
                expected = output[0, len(tokens) :].tolist()
            else:
                expected = decoder.generate(
                    tokens, max_new_tokens=max_new_tokens, ignore_eos=True, sampling=sampling, speculation=False
                ).tokens
            for way, speculation in WAYS.items():
                found = decoder.generate(
                    tokens, max_new_tokens=max_new_tokens, ignore_eos=True, sampling=sampling, speculation=speculation
                )
                matched[setting][way] += found.tokens == expected
                accepted[setting][way] += found.metrics.accepted
    table = Table("setting", *WAYS, title=f"prompts of {len(requests)} with equal tokens (drafted tokens accepted)")
    for setting in SETTINGS:
        table.add_row(setting, *(f"{matched[setting][way]} ({accepted[setting][way]})" for way in WAYS))
    Console().print(table)
    if out is not None:
        record = {
            "prompts": len(requests), "max_new_tokens": max_new_tokens, "plan": plan, "dtype": "float32",
            "matched": matched, "accepted": accepted,
        }  # fmt: skip
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    worst = min(count for counts in matched.values() for count in counts.values())
    raise typer.Exit(0 if worst == len(requests) else 1)


if __name__ == "__main__":
    typer.run(main)
