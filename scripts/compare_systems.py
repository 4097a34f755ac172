"""Compare Yggdrasil with the systems people would use instead, on one pair, the same prompts, dtype and threads.

    scripts/compare_systems --plan demo --prompts unseen.jsonl --limit 12 --llama-cpp work/llama.cpp --json out.json

Every system continues the same token ids greedily by the same number of tokens, prompt by prompt, in turns. A system
that cannot be had says why and is left out. Interrupted, the same command goes on where it stopped.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from llama_cpp import CACHE_OPTIONS, DRAFT_CACHE_OPTIONS, LlamaCpp, LlamaServer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.record import provenance
from yggdrasil.bench.systems import EngineSystem, Sample, System, run_systems, summarise_systems
from yggdrasil.bench.transformers_systems import transformers_systems
from yggdrasil.engine.decoder import DTYPES, Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import read_prompts
from yggdrasil.scheduling.plan import Plan

OURS, PLAIN = "yggdrasil, by plan", "yggdrasil, plain compiled"
console = Console(stderr=True)


def main(  # noqa: PLR0913 - one argument for each option
    plan: Annotated[str, typer.Option(help="A plan file, or a name that has a plan for this machine.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt field, unseen by the calibration.")],
    limit: Annotated[int | None, typer.Option(help="Use at most so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate on each.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 256,
    dtype: Annotated[Literal["bfloat16", "float32"] | None, typer.Option(help="Default: the plan's.")] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Work folder; llama.cpp is built there once. None: left out.")
    ] = None,
    draft_tokens: Annotated[str, typer.Option(help="Draft lengths of the rivals that have a fixed one.")] = "4,8",
    out: Annotated[Path | None, typer.Option("--json", help="Every sample and the summary; resumed if there.")] = None,
    force_machine: Annotated[bool, typer.Option(help="Use a plan that was calibrated on another machine.")] = False,
) -> None:
    """Print one row a system: tokens equal, AAL, TPOT with quartiles, ratio to ours."""
    lengths = [int(length) for length in draft_tokens.split(",")]
    try:
        decoder = Decoder.from_plan(plan, dtype=dtype, force_machine=force_machine)
        assert decoder.plan is not None
        chosen = dtype or decoder.plan.dtype
        texts = {
            prompt.id: decoder.encode(decoder.encode(prompt.prompt)[-max_prompt_tokens:])
            for prompt in read_prompts(prompts, limit)
        }
        with ExitStack() as running:
            systems: list[System] = [
                EngineSystem(OURS, decoder),
                EngineSystem(PLAIN, decoder, is_plain=True),
                *_transformers(decoder.plan, chosen, lengths),
                *_llama_cpp(decoder.plan, chosen, lengths, llama_cpp, running),
            ]
            settings = {
                "plan": decoder.plan.name,
                "target": decoder.plan.target.source,
                "drafter": decoder.plan.drafter.source,
                "threads": {"target": decoder.plan.target.threads, "drafter": decoder.plan.drafter.threads},
                "dtype": chosen,
                "prompts_file": prompts.name,
                "max_new_tokens": max_new_tokens,
                "max_prompt_tokens": max_prompt_tokens,
                "systems": [system.name for system in systems],
            }
            samples = _measure(systems, texts, max_new_tokens, settings, out)
        rows = summarise_systems(systems, samples, OURS)
    except YggdrasilError as error:
        console.print(f"compare_systems: {error}", markup=False)
        raise typer.Exit(2) from error
    _show(rows)
    if out is not None:
        _write(out, settings, samples, rows)


def _transformers(plan: Plan, dtype: str, lengths: list[int]) -> list[System]:
    source = plan.target.path(), plan.drafter.path()
    threads, max_length = plan.target.threads, plan.shapes.max_length
    return transformers_systems(*source, DTYPES[dtype], threads, max_length, lengths)


def _llama_cpp(plan: Plan, dtype: str, lengths: list[int], work: Path | None, running: ExitStack) -> Iterator[System]:
    """Its server: plain, with our drafter at each draft length, and with each of its n-gram look-ups."""
    if work is None:
        console.print("llama.cpp: left out, give --llama-cpp FOLDER to build it there")
        return
    try:
        llama = LlamaCpp(work, lambda text: console.print(text, markup=False))
        llama.build(os.cpu_count() or 1)
        target, drafter = (llama.convert(model.path(), dtype) for model in (plan.target, plan.drafter))
    except YggdrasilError as error:
        console.print(f"left out: {error}", markup=False)
        return
    console.print(llama.version(), markup=False)
    common = [
        *("--model", str(target), "--ctx-size", str(plan.shapes.max_length), "--threads", str(plan.target.threads)),
        *CACHE_OPTIONS[dtype],
    ]
    draft = [
        *("--spec-type", "draft-simple", "--spec-draft-model", str(drafter)),
        *("--spec-draft-threads", str(plan.drafter.threads), *DRAFT_CACHE_OPTIONS[dtype]),
    ]
    ways = {
        "llama.cpp, plain": [],
        **{f"llama.cpp, draft model, {n} tokens": [*draft, "--spec-draft-n-max", str(n)] for n in lengths},
        "llama.cpp, n-gram cache": ["--spec-type", "ngram-cache"],
        "llama.cpp, n-gram look-up": ["--spec-type", "ngram-simple"],
    }
    for number, (name, options) in enumerate(ways.items()):
        log = work / f"server-{number}.log"
        try:
            yield running.enter_context(LlamaServer(name, llama.server, [*common, *options], log, is_plain=not options))
        except YggdrasilError as error:
            console.print(f"left out: {error}", markup=False)


def _measure(
    systems: list[System], texts: dict[str, list[int]], max_new_tokens: int, settings: dict[str, Any], out: Path | None
) -> list[Sample]:
    """Samples of all prompts; those that ``out`` already holds under the same settings are kept."""
    samples = _resumed(out, settings)
    done = {sample.prompt for sample in samples} & set(texts)
    samples = [sample for sample in samples if sample.prompt in done]
    left = {prompt: tokens for prompt, tokens in texts.items() if prompt not in done}
    with Progress(console=console) as progress:
        bar = progress.add_task(f"{len(systems)} systems, {len(texts)} prompts", total=len(texts), completed=len(done))

        def note(prompt: str, found: list[Sample]) -> None:
            samples.extend(found)
            progress.advance(bar)
            if out is not None:
                _write(out, settings, samples, [])

        if left:
            run_systems(systems, left, max_new_tokens, note)
    return samples


def _resumed(out: Path | None, settings: dict[str, Any]) -> list[Sample]:
    if out is None or not out.exists():
        return []
    try:
        record = json.loads(out.read_text())
    except json.JSONDecodeError as error:
        raise YggdrasilError(f"{out} is not JSON; remove it or give another --json file") from error
    if record.get("settings") != settings:
        raise YggdrasilError(f"{out} holds a comparison with other settings; remove it or give another --json file")
    return [Sample.from_dict(values) for values in record["samples"]]


def _write(out: Path, settings: dict[str, Any], samples: list[Sample], rows: list[dict[str, Any]]) -> None:
    record = {**provenance(), "settings": settings, "summary": rows, "samples": [s.as_dict() for s in samples]}
    write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("system", "as its plain", "as ours", "AAL", "TPOT ms (quartiles)", "over ours (quartiles)")
    text: Callable[[dict[str, float]], str] = lambda s: f"{s['median']:.3f} ({s['low']:.3f} to {s['high']:.3f})"  # noqa: E731
    for row in rows:
        equal = [
            "-" if row[key] is None else f"{row[key]} of {row['prompts']}" for key in ("same_as_plain", "same_as_ours")
        ]
        aal = "-" if row["aal"] is None else f"{row['aal']:.2f}"
        table.add_row(row["system"], *equal, aal, text(row["tpot_ms"]), text(row["ratio_to_ours"]))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
