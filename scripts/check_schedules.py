#!/usr/bin/env python3
"""Decode by every schedule there is, on threads that honour declared dependencies alone, and compare the tokens.

    scripts/check_schedules.py --prompts prompts.jsonl --limit 20 --max-new-tokens 48
    scripts/check_schedules.py --prompts prompts.jsonl --limit 1 --forget commit:tail_draft   # must fail

In float32, against transformers' own ``generate``. Stages are delayed at random, now and then for longer than the
others take; each prompt takes another tree. A drafter that read too early guesses worse, and no token is wrong: so the
trees and what was accepted of them must be those of decoding in order, too. Exit code 1 if anything differs. Steps run
eagerly: nothing is compiled.
"""

import random
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.documents import open_ended_stream
from yggdrasil.calibration.pair import build_assembly
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.cli import run_script
from yggdrasil.engine.engine import Engine
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import InOrderExecutor, Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.scheduling.plan import Plan, Shapes
from yggdrasil.scheduling.stages import DEFAULT_ORDER, STAGES, Schedule, all_variants
from yggdrasil.tree.shape import TreeShape

SHAPES = Shapes(max_length=512, draft_widths=(1, 2, 4), max_depth=4, candidates=4, verify_widths=(1, 4, 8, 16))
TREES = (TreeShape(1, 4, 4), TreeShape(2, 3, 8), TreeShape(4, 4, 16), TreeShape(4, 2, 8))
RARE, LONG = 10, 20  # one delay in RARE is LONG times as long as usual: longer than verification
OTHER_TREES = "other trees, or other lengths accepted,"
console = Console()
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt field.")],
    plan: Annotated[
        Path | None, typer.Option(help="A plan file whose pair is taken; the bundled pair if not given.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts that every schedule decodes.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 48,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 64,
    delay_ms: Annotated[float, typer.Option(help="Usual longest delay of a stage.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the delays.")] = 0,
    forget: Annotated[
        list[str] | None,
        typer.Option(help="A dependency to drop, as stage:predecessor: the check must see that it is missing."),
    ] = None,
) -> None:
    """Print how many schedules gave exactly transformers' tokens, by the same trees as in order, on every prompt."""
    forgotten = _pairs(forget or [])
    source = _source(plan)
    tokenizer = load_tokenizer(source.target)
    engine = build_assembly(source, backend="eager").engine
    reference = AutoModelForCausalLM.from_pretrained(source.target, dtype=torch.float32)
    delays = random.Random(seed)
    from threaded_executor import ThreadedExecutor

    threads = ThreadedExecutor(lambda _: _delay(delays, delay_ms) / 1e3, forgotten)
    schedules = [Schedule.of(variants).labels for variants in all_variants()]
    wrong: set[tuple[str, ...]] = set()
    texts = read_prompts(prompts, limit)
    for number, prompt in enumerate(track(texts, "prompts", console=console)):
        text = encode_prompt(tokenizer, prompt)[-max_prompt_tokens:]
        expected = _generate(reference, text, max_new_tokens)
        usual = [
            _in_order(engine, DEFAULT_ORDER, text, open_ended_stream(tokenizer, max_new_tokens), tree) for tree in TREES
        ]
        for place, labels in enumerate(schedules):
            at = (number + place) % len(TREES)
            engine.use_schedule(labels)
            engine.executor = threads
            run = _decode(engine, text, open_ended_stream(tokenizer, max_new_tokens), TREES[at])
            fault = _fault(expected, usual[at], run)
            if fault == OTHER_TREES:  # by a near tie among drafted nodes; not where the same schedule in order has it
                again = _in_order(engine, labels, text, open_ended_stream(tokenizer, max_new_tokens), TREES[at])
                fault = _fault(expected, again, run)
            if fault:
                wrong.add(labels)
                console.print(f"[red]prompt {prompt.id}: {fault} by {' '.join(labels)}", soft_wrap=True)
    console.print(
        f"{len(schedules) - len(wrong)} of {len(schedules)} schedules gave transformers' tokens by the same trees on "
        f"{len(texts)} prompts x {max_new_tokens} tokens, float32, delays up to {delay_ms} ms and now and then "
        f"{LONG * delay_ms} ms",
        soft_wrap=True,
    )
    raise typer.Exit(1 if wrong else 0)


class _Run(NamedTuple):
    """What one request gave; ``failure`` where a stage found its inputs missing."""

    tokens: list[int]
    trace: Trace
    failure: str = ""


def _delay(source: random.Random, usual_ms: float) -> float:
    return source.random() * usual_ms * (LONG if source.randrange(RARE) == 0 else 1)


def _in_order(engine: Engine, labels: tuple[str, ...], text: list[int], stream: TextStream, tree: TreeShape) -> _Run:
    engine.use_schedule(labels)
    engine.executor = InOrderExecutor()
    return _decode(engine, text, stream, tree)


def _decode(engine: Engine, text: list[int], stream: TextStream, tree: TreeShape) -> _Run:
    trace = Trace()
    try:
        for _ in engine.decode(text, stream, FixedPolicy(tree), trace):
            pass
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return _Run(stream.tokens, trace, f"{type(error).__name__} {error}".strip())
    return _Run(stream.tokens, trace)


def _fault(expected: list[int], in_order: _Run, on_threads: _Run) -> str:
    """What is wrong with a run on threads, empty where nothing is."""
    if on_threads.failure:
        return f"a stage failed ({on_threads.failure})"
    if not in_order.tokens == on_threads.tokens == expected:
        return "other tokens"
    ours, theirs = ((run.trace.shapes, run.trace.accepted) for run in (on_threads, in_order))
    return "" if ours == theirs else OTHER_TREES


def _pairs(texts: list[str]) -> list[tuple[str, str]]:
    pairs = [(stage, predecessor) for stage, _, predecessor in (text.partition(":") for text in texts)]
    unknown = [name for pair in pairs for name in pair if name not in STAGES]
    if unknown:
        raise YggdrasilError(f"--forget takes stage:predecessor of {', '.join(STAGES)}, not {unknown[0]!r}")
    return pairs


def _source(plan: Path | None) -> PairSource:
    if plan is None:
        assets = Path(__file__).resolve().parents[1] / "yggdrasil" / "assets" / "tiny"
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
    run_script(main, "check_schedules")
