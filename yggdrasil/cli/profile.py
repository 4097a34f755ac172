"""``yggdrasil profile``: times steps and iterations, and compares them with the machine's limits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from yggdrasil.cli import checks
from yggdrasil.cli.checks import parse_widths
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.shared_options import ChatOption, Dtype, ForceOption, ModelArgument
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    import pandas as pd

    from yggdrasil.calibration.calibration_settings import PairSource
    from yggdrasil.prompts import Prompt

Phase: TypeAlias = Callable[[str], Callable[[float], None]]

TABLE_COLUMNS = (
    "model", "step", "width", "context", "capacity", "ms", "p10_ms", "p90_ms", "against_plain", "against_smallest",
    "megabytes", "megaflops", "least_ms", "share_of_limit",
)  # fmt: skip

PROMPT_TOKENS, NEW_TOKENS = 256, 64
TRACED = 4  # prompts at most


def profile(
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
    from yggdrasil.calibration.measurement.step_times import time_against_limits
    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.prompts import read_prompts

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
) -> "PairSource":
    """Return the plan's models with the given widths and dtype."""
    from yggdrasil.artifacts import current_machine, resolve_plan
    from yggdrasil.calibration.calibration_settings import PairSource
    from yggdrasil.scheduling.plan import Plan, check_plan

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


def _texts(pair: "PairSource", requests: "Sequence[Prompt]") -> list[list[int]]:
    """Return the last tokens of each prompt. Raises YggdrasilError if one is empty."""
    from yggdrasil.checkpoints.facts import load_tokenizer
    from yggdrasil.prompts import encode_prompt

    if not requests:
        return []
    tokenizer = load_tokenizer(pair.target)
    texts = [encode_prompt(tokenizer, request)[-PROMPT_TOKENS:] for request in requests]
    if [] in texts:
        raise YggdrasilError(f"{requests[texts.index([])].place}: the prompt is empty; give at least one token of text")
    return texts


def _show(tables: "dict[str, pd.DataFrame]") -> None:
    from yggdrasil.cli.progress import show_table

    rates = tables["roofline"].groupby("model")[["bandwidth_gb_s", "matrix_gflops_s"]].first()
    for model, row in rates.iterrows():
        print(
            f"{model}: this machine reads {row['bandwidth_gb_s']:.1f} GB/s and multiplies at "
            f"{row['matrix_gflops_s']:.0f} GFLOP/s with the {model}'s threads, dtype and size"
        )
    show_table("steps and the machine's limits", tables["roofline"][list(TABLE_COLUMNS)])
    if "iterations" in tables:
        show_table("iterations", tables["iterations"])


def _iterations(
    plan: str, texts: Sequence[Sequence[int]], dtype: Dtype | None, *, force_machine: bool
) -> "pd.DataFrame":
    from yggdrasil.bench.iterations import time_by_stage
    from yggdrasil.engine.decoder import Decoder

    return time_by_stage(Decoder.from_plan(plan, dtype=dtype, force_machine=force_machine), texts, NEW_TOKENS)


def _write(folder: Path, tables: "dict[str, pd.DataFrame]") -> None:
    from yggdrasil.artifacts import write_csv

    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_csv(folder / f"{name}.csv", name, 1, table)
