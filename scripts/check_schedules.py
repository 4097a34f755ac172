#!/usr/bin/env python3
"""Decode by every schedule there is, on threads that honour declared dependencies alone, and compare the tokens.

    scripts/check_schedules.py --prompts prompts.jsonl --limit 20 --max-new-tokens 48

In float32, against transformers' own ``generate``. Stages are delayed at random; each prompt takes another tree. Exit
code 1 if any token differs. Steps run eagerly: nothing is compiled.
"""

import random
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from yggdrasil.calibration.pair import build_assembly
from yggdrasil.calibration.pipeline import open_ended
from yggdrasil.calibration.settings import PairSource
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.loading import load_tokenizer
from yggdrasil.prompts import read_prompts
from yggdrasil.scheduling.executors import ThreadedExecutor
from yggdrasil.scheduling.plan import Plan, Shapes
from yggdrasil.scheduling.stages import Schedule, all_variants
from yggdrasil.tree.objective import TreeShape

SHAPES = Shapes(max_length=512, draft_widths=(1, 2, 4), max_depth=4, candidates=4, verify_widths=(1, 4, 8, 16))
TREES = (TreeShape(1, 4, 4), TreeShape(2, 3, 8), TreeShape(4, 4, 16), TreeShape(4, 2, 8))
console = Console()


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt field.")],
    plan: Annotated[
        Path | None, typer.Option(help="A plan file whose pair is taken; the bundled pair if not given.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts that every schedule decodes.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 48,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 64,
    delay_ms: Annotated[float, typer.Option(help="Longest delay of a stage.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the delays.")] = 0,
) -> None:
    """Print how many schedules gave exactly transformers' tokens on every prompt."""
    source = _source(plan)
    schedules = [Schedule.of(variants) for variants in all_variants()]
    tokenizer = load_tokenizer(source.target)
    assembly = build_assembly(source, backend="eager")
    engine = assembly.engine
    reference = AutoModelForCausalLM.from_pretrained(source.target, dtype=torch.float32)
    delays = random.Random(seed)
    engine.executor = ThreadedExecutor(lambda _: delays.random() * delay_ms / 1e3)
    wrong: set[tuple[str, ...]] = set()
    for number, prompt in enumerate(track(read_prompts(prompts, limit), "prompts", console=console)):
        text = list(tokenizer(prompt.prompt)["input_ids"])[-max_prompt_tokens:]
        expected = _generate(reference, text, max_new_tokens)
        for place, schedule in enumerate(schedules):
            engine.use(schedule.labels)
            stream = open_ended(tokenizer, max_new_tokens)
            for _ in engine.decode(text, stream, FixedPolicy(TREES[(number + place) % len(TREES)]), Trace()):
                pass
            if stream.tokens != expected:
                wrong.add(schedule.labels)
                console.print(f"[red]prompt {prompt.id}: other tokens by {' '.join(schedule.labels)}")
    console.print(
        f"{len(schedules) - len(wrong)} of {len(schedules)} schedules gave transformers' tokens on {number + 1} "
        f"prompts x {max_new_tokens} tokens, float32, delays up to {delay_ms} ms"
    )
    raise typer.Exit(1 if wrong else 0)


def _source(plan: Path | None) -> PairSource:
    if plan is None:
        assets = Path(__file__).resolve().parents[1] / "yggdrasil" / "assets" / "demo"
        return PairSource(str(assets / "target"), str(assets / "drafter"), "float32", 1, 1, SHAPES, schedules=_all())
    loaded = Plan.load(plan)
    if not hasattr(loaded.drafter, "path"):
        raise YggdrasilError(f"{plan} drafts without a model; take a plan with a draft model")
    return PairSource(loaded.target.path(), loaded.drafter.path(), "float32", 1, 1, SHAPES, schedules=_all())


def _all() -> tuple[tuple[str, ...], ...]:
    return tuple(Schedule.of(variants).labels for variants in all_variants())


def _generate(model: torch.nn.Module, text: list[int], count: int) -> list[int]:
    tokens = torch.tensor([text])
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, len(text) :].tolist()


if __name__ == "__main__":
    typer.run(main)
