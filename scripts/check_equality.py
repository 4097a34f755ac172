#!/usr/bin/env python3
"""Compare speculative output, token for token, with transformers' ``generate`` and our own plain loop.

    scripts/check_equality.py --prompts c4.jsonl --prompts wikipedia.jsonl --limit 50 --json equality.json

In float32, the weights of a GGUF file dequantised, the reference at temperature 0 is transformers' own ``generate``,
else plain decoding under the same seed. Layers over quantised weights round their inputs, which transformers does not:
``--as-planned`` keeps the plan's weights and arithmetic, and plain decoding is the reference. Ways of drafting: the
plan's policy, an Equal-Growth Tree and a chain at every step, a k-ary tree of a draft model, none. Exit code 1 if any
token differs; the first places are printed.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import torch
import typer
from prompt_sets import read_prompt_sets
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, OFF, Speculation
from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.divergence import first_divergence
from yggdrasil.bench.record import provenance
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import checks, run_script
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy, Policy
from yggdrasil.prompts import encode_prompt
from yggdrasil.scheduling.plan import ModelRef, Plan, Shapes
from yggdrasil.tree.shape import TreeShape

T = TypeVar("T")
SETTINGS = {
    "T=0": SamplingParams(),
    "T=0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=7),
    "T=1": SamplingParams(temperature=1.0, seed=11),
    "T=1.5, min-p 0.05": SamplingParams(temperature=1.5, min_p=0.05, seed=13),
}


class Way(NamedTuple):
    """One way of drafting."""

    policy: Policy
    speculation: Speculation = DEFAULT


def main(  # noqa: PLR0913 - one argument for each option
    prompts: Annotated[list[Path], typer.Option(help="JSON lines with a prompt field; repeat it for several sets.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")] = "tiny",
    limit: Annotated[int, typer.Option(help="Prompts of each set.")] = 25,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 128,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn.")] = False,
    setting: Annotated[list[str] | None, typer.Option(help=f"Only this one of {'; '.join(SETTINGS)}.")] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="Only this one of plan, counts, EGT, chain, k-ary, off.")
    ] = None,
    as_planned: Annotated[
        bool, typer.Option("--as-planned", help="The plan's own weights and arithmetic against plain decoding.")
    ] = False,
    force_machine: Annotated[bool, typer.Option("--force-machine", help="Use another machine's plan.")] = False,
    out: Annotated[
        Path | None, typer.Option("--json", callback=checks.output_file, help="Write the counts here.")
    ] = None,
) -> None:
    """Print, for each setting and way of drafting, how many prompts match."""
    warnings.simplefilter("ignore", UserWarning)  # the plan was calibrated at temperature 0
    decoder = Decoder.from_plan(plan, dtype=None if as_planned else "float32", force_machine=force_machine)
    assert decoder.plan is not None
    weights = decoder.plan.target.weights if as_planned else decoder.plan.weights_in("float32")
    if weights != "full" and not as_planned:
        raise YggdrasilError(f"{plan} rounds weights to {weights}, which transformers does not; use --as-planned")
    ways = chosen_of("--way", ways_of(decoder.policy, decoder.plan), way)
    settings = chosen_of("--setting", SETTINGS, setting)
    reference = None if as_planned else transformers_model(decoder.plan)
    matched = {setting: dict.fromkeys(ways, 0) for setting in settings}
    accepted = {setting: dict.fromkeys(ways, 0) for setting in settings}
    differences: list[str] = []
    requests = read_prompt_sets(prompts, limit, chat=chat)
    for prompt in track(requests, console=Console(stderr=True), description="prompts"):
        tokens = encode_prompt(decoder.tokenizer, prompt)[-max_prompt_tokens:]
        for setting_name, sampling in settings.items():
            expected = (
                greedy(reference, tokens, max_new_tokens)
                if sampling.is_greedy and reference is not None
                else decoder.generate(
                    tokens, max_new_tokens=max_new_tokens, ignore_eos=True, sampling=sampling, speculation=False
                ).tokens
            )
            for name, chosen in ways.items():
                decoder.policy = chosen.policy
                found = decoder.generate(
                    tokens, max_new_tokens=max_new_tokens, ignore_eos=True, sampling=sampling,
                    speculation=chosen.speculation,
                )  # fmt: skip
                place = first_divergence(expected, found.tokens)
                if place is not None:
                    differences.append(f"{prompt.id}, {setting_name}, {name}: differs from token {place} on")
                matched[setting_name][name] += place is None
                accepted[setting_name][name] += found.metrics.accepted
    show(matched, accepted, differences, len(requests))
    if out is not None:
        record = {
            **provenance(), "plan": decoder.plan.name, "dtype": decoder.plan.dtype if as_planned else "float32",
            "weights": weights, "prompts": len(requests),
            "chat": chat,
            "prompts_files": [path.name for path in prompts],
            "max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens,
            "matched": matched, "accepted": accepted, "differences": differences,
        }  # fmt: skip
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    raise typer.Exit(1 if differences else 0)


def ways_of(planned: Policy, plan: Plan) -> dict[str, Way]:
    """Ways of drafting by name. The plan may decode plainly throughout; a fixed shape speculates at every step."""
    shapes, has_model = plan.shapes, isinstance(plan.drafter, ModelRef)
    width = max((width for width in shapes.draft_widths if width <= 4), default=0)
    return {
        "plan": Way(planned),
        **({"counts": Way(ModelFreePolicy(verified(shapes, 16)))} if plan.model_free else {}),
        **(
            {
                "EGT": Way(FixedPolicy(TreeShape(width, min(4, shapes.max_depth), verified(shapes, 16)))),
                "chain": Way(FixedPolicy(TreeShape(1, min(3, shapes.max_depth), verified(shapes, 4)))),
                "k-ary": Way(planned, Speculation(expansion=(2, 2, 1))),
            }
            if has_model
            else {}
        ),
        "off": Way(planned, OFF),
    }


def verified(shapes: Shapes, wanted: int) -> int:
    """The widest verify width up to ``wanted``: a plan keeps only those that pay."""
    return max((width for width in shapes.verify_widths if width <= wanted), default=shapes.verify_widths[0])


def chosen_of(option: str, known: Mapping[str, T], names: list[str] | None) -> dict[str, T]:
    """Those of ``known`` that an option names; all where it names none."""
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise YggdrasilError(f"{option} {unknown[0]!r} is not there; choose from {'; '.join(known)}")
    return {name: value for name, value in known.items() if not names or name in names}


def transformers_model(plan: Plan) -> PreTrainedModel:
    """The plan's target as transformers has it, in float32."""
    checkpoint = Source.find(plan.target.path()).checkpoint(torch.float32)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def greedy(model: PreTrainedModel, tokens: list[int], max_new_tokens: int) -> list[int]:
    """What transformers' ``generate`` gives."""
    inputs = torch.tensor([tokens])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(tokens) :].tolist()


def show(
    matched: dict[str, dict[str, int]], accepted: dict[str, dict[str, int]], differences: list[str], count: int
) -> None:
    """Print the counts, and the first places that differ."""
    names = list(next(iter(matched.values())))
    table = Table("setting", *names, title=f"prompts of {count} with equal tokens (drafted tokens accepted)")
    for setting in matched:
        table.add_row(setting, *(f"{matched[setting][name]} ({accepted[setting][name]})" for name in names))
    console = Console()
    console.print(table)
    for difference in differences[:10]:
        console.print(difference, markup=False)


if __name__ == "__main__":
    run_script(main, "check_equality")
