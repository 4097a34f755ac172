#!/usr/bin/env python3
"""Time every step of a plan, compare it with the machine's limits, and time iterations by stage.

    scripts/profile_steps.py mine --contexts 128,1024 --out profiles/mine/MACHINE
    scripts/profile_steps.py mine --max-length 8192,4224 --prompts unseen.jsonl

``yggdrasil report`` shows the tables that are in the plan's profile folder.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from step_times import show_table, time_against_limits

from yggdrasil.artifacts import current_machine, resolve_plan, write_csv
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.checks import parse_widths
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.cli.shared_options import ChatOption, Dtype, ForceOption, ModelArgument
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.trace import MODEL_STAGES
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import Prompt, encode_prompt, read_prompts
from yggdrasil.scheduling.plan import Plan, check_plan

TABLE_COLUMNS = (
    "model", "step", "width", "context", "capacity", "ms", "p10_ms", "p90_ms", "against_plain", "against_smallest",
    "megabytes", "megaflops", "least_ms", "share_of_limit",
)  # fmt: skip

PROMPT_TOKENS, NEW_TOKENS = 256, 64
TRACED = 4  # prompts at most


def main(  # noqa: PLR0913 - one argument for each option
    plan: ModelArgument,
    contexts: Annotated[str, typer.Option(callback=checks.widths, help="Context lengths.")] = "128,1024",
    max_length: Annotated[
        str | None,
        typer.Option(
            callback=checks.widths, help="Capacity of the KV caches, or several (8192,4224). Default: the plan's."
        ),
    ] = None,
    verify_widths: Annotated[
        str | None, typer.Option(callback=checks.widths, help="Widths to time. Default: the plan's.")
    ] = None,
    draft_widths: Annotated[
        str | None, typer.Option(callback=checks.widths, help="Widths to time. Default: the plan's.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each runs every step three times.")] = 7,
    prompts: Annotated[
        Path | None,
        typer.Option(
            callback=checks.input_file, help="JSON lines with a prompt field: decode up to four, show time by stage."
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of both models. Default: the plan's.")] = None,
    out: Annotated[
        Path | None, typer.Option(callback=checks.output_folder, help="Folder for roofline.csv and the other tables.")
    ] = None,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Time every step, compare it with the machine's bandwidth and matrix throughput, and time iterations by stage."""

    requests = [] if prompts is None else read_prompts(prompts, TRACED, chat=chat)  # before a model is loaded
    plan = plan_of(plan)
    pair = _pair(plan, dtype, verify_widths, draft_widths, force_machine=force_machine)
    texts = _texts(pair, requests)
    lengths = parse_widths(contexts)
    capacities = parse_widths(max_length) if max_length else (max(pair.shapes.max_length, *lengths),)
    tables: dict[str, pd.DataFrame] = {}
    with PhaseProgress() as progress:
        tables["roofline"] = time_against_limits(pair, lengths, capacities, rounds, progress.phase)
    if texts:
        tables["iterations"] = _iterations(plan, texts, dtype, force_machine=force_machine)
    _show(tables)
    if out is not None:
        _write(out, tables)


def _pair(
    plan: str, dtype: Dtype | None, verify_widths: str | None, draft_widths: str | None, *, force_machine: bool
) -> PairSource:
    """Return the plan's models with the given widths and dtype."""

    machine = current_machine()
    path = resolve_plan(plan, machine, force=force_machine)
    loaded = Plan.load(path)
    check_plan(loaded, machine, force_machine=force_machine)
    try:
        shapes = replace(
            loaded.shapes,
            verify_widths=parse_widths(verify_widths) if verify_widths else loaded.shapes.verify_widths,
            draft_widths=parse_widths(draft_widths) if draft_widths else loaded.shapes.draft_widths,
        )
    except ValueError as error:
        raise YggdrasilError(f"--verify-widths or --draft-widths cannot be timed for this plan: {error}") from error
    arithmetic = dtype or loaded.dtype
    kept = loaded.weights_in(arithmetic)
    source = PairSource.of_plan(loaded, path.parent / loaded.predictor)
    return replace(source, dtype=arithmetic, weights=kept, shapes=shapes)


def _texts(pair: PairSource, requests: Sequence[Prompt]) -> list[list[int]]:
    """Return the last tokens of each prompt. Raises YggdrasilError if one is empty."""

    if not requests:
        return []
    tokenizer = load_tokenizer(pair.target)
    texts = [encode_prompt(tokenizer, request)[-PROMPT_TOKENS:] for request in requests]
    if [] in texts:
        raise YggdrasilError(f"{requests[texts.index([])].place}: the prompt is empty; give at least one token of text")
    return texts


def _show(tables: dict[str, pd.DataFrame]) -> None:

    rates = tables["roofline"].groupby("model")[["bandwidth_gb_s", "matrix_gflops_s"]].first()
    for model, row in rates.iterrows():
        print(
            f"{model}: this machine reads {row['bandwidth_gb_s']:.1f} GB/s and multiplies at "
            f"{row['matrix_gflops_s']:.0f} GFLOP/s with the {model}'s threads, dtype and size"
        )
    show_table("steps and the machine's limits", tables["roofline"][list(TABLE_COLUMNS)])
    if "iterations" in tables:
        show_table("iterations", tables["iterations"])


def _iterations(plan: str, texts: Sequence[Sequence[int]], dtype: Dtype | None, *, force_machine: bool) -> pd.DataFrame:

    return time_by_stage(Decoder.from_plan(plan, dtype=dtype, force_machine=force_machine), texts, NEW_TOKENS)


def _write(folder: Path, tables: dict[str, pd.DataFrame]) -> None:

    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_csv(folder / f"{name}.csv", name, 1, table)


def time_by_stage(decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> pd.DataFrame:
    """Return milliseconds per iteration by stage, and their share of the decoding time.

    Every prompt is decoded twice; the first time warms up. Columns are ``stage``, ``part`` ("model" or "overhead"),
    ``ms_an_iteration`` and ``share``.
    """
    totals: dict[str, float] = {}
    iterations, decode_ms = 0, 0.0
    for is_counted in (False, True):
        for prompt in prompts:
            metrics = decoder.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True).metrics
            if not is_counted:
                continue
            iterations += metrics.iterations
            decode_ms += metrics.tpot_ms * (metrics.aal * metrics.iterations)
            for stage, ms in metrics.stage_ms.items():
                totals[stage] = totals.get(stage, 0.0) + ms
    totals["between stages"] = decode_ms - sum(totals.values())
    return pd.DataFrame(
        {
            "stage": list(totals),
            "part": ["model" if stage in MODEL_STAGES else "overhead" for stage in totals],
            "ms_an_iteration": [ms / max(iterations, 1) for ms in totals.values()],
            "share": [ms / decode_ms if decode_ms else 0.0 for ms in totals.values()],
        }
    )


if __name__ == "__main__":
    run_script(main, "profile_steps")
