"""Compare Yggdrasil with the systems people would use instead, on one model or pair, the same prompts and threads.

    scripts/compare_systems --plan tiny --prompts unseen.jsonl --limit 12 --llama-cpp work/llama.cpp --json out.json
    scripts/compare_systems --plan tiny --prompts c4.jsonl --prompts wikipedia.jsonl --json systems.json

Every system continues the same token ids greedily by the same number of tokens, prompt by prompt, in turns. A system
that cannot be had says why and is left out. Interrupted, the same command goes on where it stopped. Several sets of
prompts share one set-up (models, servers, compilation), and each gets a file of its own: systems-c4.json and so on.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer
from llama_cpp import CACHE_OPTIONS, DRAFT_CACHE_OPTIONS, LlamaCpp, LlamaServer
from rich.console import Console

from yggdrasil.bench.record import pair_settings
from yggdrasil.bench.store import SampleFile, measure
from yggdrasil.bench.systems import EngineSystem, System, encode_prompts, judge_by_replay, summarise_systems
from yggdrasil.bench.transformers_systems import transformers_systems
from yggdrasil.cli import run_script
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.cli.trees import show_systems
from yggdrasil.engine.decoder import DTYPES, Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import read_prompts
from yggdrasil.scheduling.plan import ModelRef, Plan

OURS, PLAIN = "yggdrasil, by plan", "yggdrasil, plain compiled"
console = Console(stderr=True)


def main(  # noqa: PLR0913 - one argument for each option
    plan: Annotated[str, typer.Option(help="A plan file, or a name that has a plan for this machine.")],
    prompts: Annotated[
        list[Path], typer.Option(help="JSON lines with a prompt field, unseen by the calibration; can be repeated.")
    ],
    limit: Annotated[int | None, typer.Option(help="Use at most so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate on each.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 256,
    dtype: Annotated[Literal["bfloat16", "float32"] | None, typer.Option(help="Default: the plan's.")] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Work folder; llama.cpp is built there once. None: left out.")
    ] = None,
    draft_tokens: Annotated[str, typer.Option(help="Draft lengths of the rivals that have a fixed one.")] = "4,8",
    out: Annotated[Path | None, typer.Option("--json", help="Every sample and the summary; resumed if there.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn.")] = False,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave out systems whose name begins like this; can be repeated.")
    ] = None,
    force_machine: Annotated[bool, typer.Option(help="Use a plan that was calibrated on another machine.")] = False,
) -> None:
    """Print one row a system: tokens equal, AAL, TPOT with quartiles, ratio to ours."""
    lengths = [int(length) for length in draft_tokens.split(",")]
    decoder = Decoder.from_plan(plan, dtype=dtype, force_machine=force_machine)
    assert decoder.plan is not None
    chosen = dtype or decoder.plan.dtype
    sets = [
        (file, encode_prompts(decoder, read_prompts(file, limit, chat=chat), max_prompt_tokens)) for file in prompts
    ]
    with ExitStack() as running:
        systems: list[System] = [
            EngineSystem(OURS, decoder),
            EngineSystem(PLAIN, decoder, is_plain=True),
            *(system for system in _transformers(decoder.plan, chosen, lengths) if _is_wanted(system.name, without)),
            *_llama_cpp(decoder.plan, chosen, lengths, llama_cpp, running, without),
        ]
        settings = {
            **pair_settings(decoder.plan, chosen),
            "max_new_tokens": max_new_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "chat": chat,
            "systems": [system.name for system in systems],
        }
        files = [
            SampleFile(_file_of(out, source, len(sets)), settings | {"prompts_file": source.name}) for source, _ in sets
        ]
        is_warm = False
        for file, (source, texts) in zip(files, sets, strict=True):
            had = len(file.samples)
            with PhaseProgress() as progress:
                report = progress.phase(f"{source.name}: {len(systems)} systems, {len(texts)} prompts")
                samples = measure(systems, texts, max_new_tokens, file, report, warm_up=not is_warm)
            is_warm = is_warm or len(file.samples) > had
            rows = summarise_systems(systems, samples, OURS, judge_by_replay(decoder, texts))
            file.save(rows)
            show_systems(rows)


def _file_of(out: Path | None, prompts: Path, num_sets: int) -> Path | None:
    """Where the samples of one set go."""
    return out if out is None or num_sets == 1 else out.with_name(f"{out.stem}-{prompts.stem}{out.suffix}")


def _is_wanted(name: str, without: list[str] | None) -> bool:
    return not any(name.startswith(beginning) for beginning in without or ())


def _drafter(plan: Plan) -> ModelRef | None:
    """The plan's draft model, which rivals draft with too."""
    return plan.drafter if isinstance(plan.drafter, ModelRef) else None


def _transformers(plan: Plan, dtype: str, lengths: list[int]) -> list[System]:
    drafter, threads, max_length = _drafter(plan), plan.target.threads, plan.shapes.max_length
    second = drafter.path() if drafter else None
    return transformers_systems(plan.target.path(), second, DTYPES[dtype], threads, max_length, lengths)


def _llama_cpp(
    plan: Plan,
    dtype: str,
    lengths: list[int],
    work: Path | None,
    running: ExitStack,
    without: list[str] | None,
) -> Iterator[System]:
    """Its server: plain, with our draft model at each draft length, and with each of its n-gram look-ups."""
    if work is None:
        console.print("llama.cpp: left out, give --llama-cpp FOLDER to build it there")
        return
    try:
        llama = LlamaCpp(work, lambda text: console.print(text, markup=False))
        llama.build(os.cpu_count() or 1)
        target, ways = llama.convert(plan.target.path(), dtype), _ways(plan, dtype, lengths, llama)
    except YggdrasilError as error:
        console.print(f"left out: {error}", markup=False)
        return
    console.print(llama.version(), markup=False)
    common = [
        *("--model", str(target), "--ctx-size", str(plan.shapes.max_length), "--threads", str(plan.target.threads)),
        *CACHE_OPTIONS[dtype],
    ]
    for number, (name, options) in enumerate(ways.items()):
        if not _is_wanted(name, without):
            continue
        log = work / f"server-{number}.log"
        try:
            yield running.enter_context(LlamaServer(name, llama.server, [*common, *options], log, is_plain=not options))
        except YggdrasilError as error:
            console.print(f"left out: {error}", markup=False)


def _ways(plan: Plan, dtype: str, lengths: list[int], llama: LlamaCpp) -> dict[str, list[str]]:
    """Name -> options of each way of decoding."""
    ways: dict[str, list[str]] = {"llama.cpp, plain": []}
    if (drafter := _drafter(plan)) is not None:
        draft = [
            *("--spec-type", "draft-simple", "--spec-draft-model", str(llama.convert(drafter.path(), dtype))),
            *("--spec-draft-threads", str(drafter.threads), *DRAFT_CACHE_OPTIONS[dtype]),
        ]
        ways |= {f"llama.cpp, draft model, {n} tokens": [*draft, "--spec-draft-n-max", str(n)] for n in lengths}
    return ways | {
        "llama.cpp, n-gram cache": ["--spec-type", "ngram-cache"],
        "llama.cpp, n-gram look-up": ["--spec-type", "ngram-simple"],
    }


if __name__ == "__main__":
    run_script(main, "compare_systems")
