#!/usr/bin/env python3
"""Compare every acceptance rule with plain decoding, or with --exactness every exactness mode, prompt by prompt.

    scripts/compare_rules.py mine --prompts unseen.jsonl --limit 6 --temperatures 0,1 --json rules.json
    scripts/compare_rules.py mine --prompts unseen.jsonl --exactness

An interrupted run goes on with the samples in the --json file. With --exactness, the exit code is 1 if `strict` or
`fixed-width` differs from plain decoding.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from prompt_sets import read_prompt_sets
from rich.table import Table
from rule_systems import EQUAL_TO_PLAIN, Group, mode_group, rule_group, summarise_group
from sample_store import SampleFile, measure, pair_settings

from yggdrasil.bench.compare import encode_prompts
from yggdrasil.bench.spread import describe
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.progress import PhaseProgress, wide_console
from yggdrasil.cli.shared_options import ChatOption, Dtype, ForceOption, ModelArgument
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import Prompt

Column = tuple[str, Callable[[dict[str, Any]], str]]
_OF_RULES: tuple[Column, ...] = (
    ("lossless", lambda row: "yes" if row["lossless"] else "NO"),
    ("AAL", lambda row: f"{row['aal']:.2f}"),
    ("of plain's time", lambda row: f"{row['ratio_to_ours']['median']:.2f}"),
    ("repeats", lambda row: f"{row['repeats']:.0%}"),
)
_OF_MODES: tuple[Column, ...] = (
    ("as its plain", lambda row: f"{row['same_as_plain']} of {row['prompts']}"),
    ("mismatches", lambda row: str(row["verify_decode_mismatches"])),
    ("near ties", lambda row: str(row["near_ties"])),
    ("flips", lambda row: str(row["flips"])),
    ("AAL", lambda row: f"{row['aal']:.2f}"),
    ("of fast's speed", lambda row: f"{1 / row['ratio_to_ours']['median']:.3f}"),
    ("repeats", lambda row: f"{row['repeats']:.0%}"),
)


def main(  # noqa: PLR0913 - one argument for each option
    plan: ModelArgument,
    prompts: Annotated[
        list[Path], typer.Option(callback=checks.input_file, help="A prompt set, JSON lines; can be repeated.")
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts per set.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens to generate per prompt; the first is the prefill's.")
    ] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Keep at most so many last tokens of a prompt.")] = 256,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the rules, such as 0,1.")] = "0,1",
    exactness: Annotated[bool, typer.Option("--exactness", help="Compare exactness modes, not rules.")] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(callback=checks.finite, help="Leads below this are near ties, in logits. Default: the plan's."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of both models. Default: the plan's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--json", callback=checks.output_file, help="File of samples and summary; its samples are reused."
        ),
    ] = None,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Print one row per rule and temperature, or per exactness mode."""
    values = _temperatures(temperatures)
    found = read_prompt_sets(prompts, limit, chat=chat)
    decoder = Decoder.from_plan(plan_of(plan), dtype=dtype, force_machine=force_machine)
    settings = {
        "max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens, "chat": chat, "limit": limit,
        "prompts_files": [path.name for path in prompts],
    }  # fmt: skip
    if not exactness:
        _show(_measure(decoder, [rule_group(decoder, value) for value in values], found, settings, out), _OF_RULES)
        return
    used = decoder.tolerance if tolerance is None else tolerance
    if used is None:
        raise YggdrasilError(
            f"strict needs the tolerance of {plan} on this machine; measure it with `yggdrasil parity {plan} "
            "--prompts FILE`, or give --tolerance"
        )
    rows = _measure(decoder, [mode_group(decoder, used)], found, settings | {"tolerance": used}, out)
    _show(rows, _OF_MODES)
    if any(row["verify_decode_mismatches"] for row in rows if row["system"] in EQUAL_TO_PLAIN):
        raise typer.Exit(1)


def _temperatures(text: str) -> list[float]:
    """Return the different numbers of a list such as ``0,1``. Raises YggdrasilError if it is none."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise YggdrasilError(f"--temperatures {text} is not a list of numbers such as 0,1")
    return list(dict.fromkeys(values))


def _measure(
    decoder: Decoder, groups: list[Group], prompts: list[Prompt], settings: dict[str, Any], out: Path | None
) -> list[dict[str, Any]]:
    """Decode ``prompts`` with every system of ``groups`` and return the summaries."""
    assert decoder.plan is not None
    systems = [system for group in groups for system in group.systems]
    texts = encode_prompts(decoder, prompts, settings["max_prompt_tokens"])
    dtype = str(decoder.assembly.target.loaded.dtype).removeprefix("torch.")
    names = [system.name for system in systems]
    file = SampleFile(out, {**pair_settings(decoder.plan, dtype), **settings, "systems": names})
    with PhaseProgress() as progress:
        report = progress.phase(f"{len(systems)} modes, {len(texts)} prompts")
        samples = measure(systems, texts, settings["max_new_tokens"], file, report)
    rows = [row for group in groups for row in summarise_group(group, samples)]
    file.save(rows)
    return rows


def _show(rows: list[dict[str, Any]], columns: tuple[Column, ...]) -> None:
    table = Table("mode", *(title for title, _ in columns), "ms per token (quartiles)")
    for row in rows:
        table.add_row(row["system"], *(text(row) for _, text in columns), describe(row["tpot_ms"], 3))
    wide_console().print(table)


if __name__ == "__main__":
    run_script(main, "compare_rules")
