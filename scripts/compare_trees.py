#!/usr/bin/env python3
"""Compare tree algorithms of other systems, and ablations of ours, on our engine at equal verify budgets.

    scripts/compare_trees.py mine --prompts unseen.jsonl --limit 16 --tree all --budget 8,16,32,64 --json trees.json

Greedy decoding, prompt by prompt. The plan needs a draft model. Interrupted, the same command with --json resumes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from bench_systems import EngineSystem, System, equality, judge_by_replay, summarise_systems
from rich.table import Table
from rivals.policies import plan_ablations
from rivals.trees import TREES, TreeBench, check_names, tree_systems
from sample_store import SampleFile, measure, model_drafter, pair_settings

from yggdrasil.bench.compare import encode_prompts
from yggdrasil.bench.spread import describe
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.progress import PhaseProgress, wide_console
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import Prompt, read_prompts

OURS, PLAIN, ALL = "yggdrasil, by plan", "yggdrasil, plain compiled", "all"


def main(  # noqa: PLR0913 - one argument for each option
    plan: Annotated[str, typer.Argument(help="A plan with a draft model: a file or a name.")],
    prompts: Annotated[
        Path, typer.Option(callback=checks.input_file, help="JSON lines with a prompt field, not used in calibration.")
    ],
    tree: Annotated[list[str], typer.Option(help=f"One of {', '.join(TREES)}, or all; can be repeated.")],
    budget: Annotated[
        str, typer.Option(callback=checks.widths, help="Verify budgets of the trees, root included.")
    ] = "8,16,32,64",
    held_back: Annotated[int, typer.Option(min=1, help="Number of last prompts, which calibrate static trees.")] = 4,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 64,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Keep at most so many last tokens of a prompt.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", callback=checks.output_file, help="File of all samples and the summary.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Plain prompts are turns of a chat.")] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="Without compiled steps: same tokens and AAL, invalid times.")
    ] = False,
    force_machine: Annotated[bool, typer.Option("--force-machine", help="Use another machine's plan.")] = False,
) -> None:
    """Print one row per tree and budget."""
    names = list(TREES) if ALL in tree else list(dict.fromkeys(tree))
    check_names(names)
    requests = read_prompts(prompts, limit, chat=chat)
    decoder = Decoder.from_plan(plan, backend="eager" if eager else None, force_machine=force_machine)
    assert decoder.plan is not None
    settings = {
        "dtype": decoder.plan.dtype, "prompts_file": prompts.name, "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens, "chat": chat, "ignore_eos": True,
    }  # fmt: skip
    budgets = checks.parse_widths(budget)
    ablates = ALL in tree
    compare_trees(decoder, requests, settings, names, budgets=budgets, held_back=held_back, out=out, ablates=ablates)


def compare_trees(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    names: Sequence[str],
    *,
    budgets: Sequence[int],
    held_back: int,
    out: Path | None,
    ablates: bool,
) -> None:
    """Decode the prompts with every tree at every budget, except the last ``held_back``, which calibrate static trees.

    ``settings`` has everything else that affects the result, including ``max_new_tokens`` and ``max_prompt_tokens``.
    """
    if not 0 < held_back < len(prompts):
        raise YggdrasilError(
            f"--held-back {held_back} of {len(prompts)} prompts leaves none to evaluate or to calibrate on; give more"
        )
    assert decoder.plan is not None
    model_drafter(decoder.plan)  # raises without one
    assert decoder.learned is not None
    ablations = plan_ablations(decoder.plan, decoder.learned) if ablates else {}
    texts = encode_prompts(decoder, prompts, settings["max_prompt_tokens"])
    evaluated = dict(list(texts.items())[:-held_back])
    bench = TreeBench(decoder, budgets, decoder.plan.costs[0].steps())
    with PhaseProgress() as progress:
        report = progress.phase(f"measuring acceptance on {held_back} prompts")
        acceptance = bench.calibrate(list(texts.values())[-held_back:])
        report(1.0)
        systems: list[System] = [
            EngineSystem(OURS, decoder),
            EngineSystem(PLAIN, decoder, is_plain=True),
            *(EngineSystem(f"yggdrasil, {name}", decoder, policy) for name, policy in ablations.items()),
            *tree_systems(bench, names, budgets),
        ]
        described = {
            **pair_settings(decoder.plan, settings["dtype"]),
            **settings,
            "backend": decoder.assembly.target.backend,
            "held_back": held_back,
            "rank_acceptance": list(acceptance),
            "systems": [system.name for system in systems],
        }
        file = SampleFile(out, described)
        report = progress.phase(f"{len(systems)} trees, {len(evaluated)} prompts")
        is_timed = decoder.assembly.target.backend != "eager"
        samples = measure(systems, evaluated, settings["max_new_tokens"], file, report, is_timed=is_timed)
    rows = summarise_systems(systems, samples, OURS, judge_by_replay(decoder, texts))
    file.save(rows)
    show_systems(rows)


def show_systems(rows: Sequence[dict[str, Any]]) -> None:
    """Print one row per system."""
    titles = "system|as its plain|as ours|AAL|TPOT ms (quartiles)|over ours (quartiles)|in all|repeats"
    table = Table(*titles.split("|"))
    for row in rows:
        equal = [equality(row, key) for key in ("same_as_plain", "same_as_ours")]
        aal, total = (f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("aal", "total_ratio_to_ours"))
        times = [describe(row["tpot_ms"], 3), describe(row["ratio_to_ours"], 3)]
        table.add_row(row["system"], *equal, aal, *times, total, f"{row['repeats']:.0%}")
    wide_console().print(table)


if __name__ == "__main__":
    run_script(main, "compare_trees")
