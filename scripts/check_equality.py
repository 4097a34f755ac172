#!/usr/bin/env python3
"""Compare a plan's output in float32 with transformers' own ``generate``, token for token.

    scripts/check_equality.py --plan demo --prompts prompts.jsonl --limit 50 --max-new-tokens 64

Runs the plan's own policy (Equal-Growth Tree), a chain and plain decoding. Exit code 1 if any token differs.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM

from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.policy import PLAIN_POLICY, FixedPolicy, Policy
from yggdrasil.prompts import read_prompts
from yggdrasil.tree.objective import TreeShape

console = Console()


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt field.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")] = "demo",
    limit: Annotated[int, typer.Option(help="Prompts to compare.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 512,
) -> None:
    """Print how many prompts match for each way of decoding."""
    decoder = Decoder.from_plan(plan, dtype="float32")
    assert decoder.plan is not None
    reference = AutoModelForCausalLM.from_pretrained(decoder.plan.target.path(), dtype=torch.float32)
    shapes = decoder.plan.shapes
    widest, tree_width = shapes.verify_widths[-1], shapes.draft_widths[-1]
    ways: dict[str, Policy] = {
        "the plan's policy": decoder.policy,
        f"tree of width {tree_width}, depth {shapes.max_depth}": FixedPolicy(
            TreeShape(tree_width, shapes.max_depth, widest)
        ),
        "chain of 4": FixedPolicy(TreeShape(1, 4, next(width for width in shapes.verify_widths if width > 4))),
        "plain": PLAIN_POLICY,
    }
    matched = dict.fromkeys(ways, 0)
    requests = read_prompts(prompts, limit)
    for prompt in requests:
        tokens = list(decoder.tokenizer(prompt.prompt)["input_ids"])[-max_prompt_tokens:]
        inputs = torch.tensor([tokens])
        output = reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected = output[0, len(tokens) :].tolist()
        for name, policy in ways.items():
            decoder.policy = policy
            generated = decoder.generate(tokens, max_new_tokens=max_new_tokens, ignore_eos=True)
            matched[name] += generated.tokens == expected
    for name, count in matched.items():
        console.print(f"{name}: {count} of {len(requests)} prompts equal to transformers' generate, float32")
    raise typer.Exit(0 if min(matched.values()) == len(requests) else 1)


if __name__ == "__main__":
    typer.run(main)
