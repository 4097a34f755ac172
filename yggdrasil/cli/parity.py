"""``yggdrasil parity``: compares wide passes with one-row passes, and writes the resulting tolerance."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from yggdrasil.cli import checks
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.shared_options import ChatOption, Dtype, ForceOption, ModelArgument

if TYPE_CHECKING:
    from yggdrasil.runtime.parity import ParityReport


def parity(
    plan: ModelArgument,
    prompts: Annotated[Path, typer.Option(callback=checks.input_file, help="JSON lines with a prompt field.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare per prompt.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Keep at most so many last tokens of a prompt.")] = 256,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of both models. Default: the plan's.")] = None,
    dump_mismatches: Annotated[
        Path | None,
        typer.Option(
            callback=checks.output_file,
            help="Write every position where a width changes the argmax to this file, as JSON lines.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=checks.output_folder, help="Folder for parity-DTYPE.yaml. Default: the plan's predictor folder."
        ),
    ] = None,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Compare passes of every width with one-row passes on the same tokens, and write the tolerance for `strict`."""
    from yggdrasil.artifacts import current_machine, resolve_plan, write_atomic
    from yggdrasil.bench.compare import encode_prompts
    from yggdrasil.bench.record import public_source
    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.engine.decoder import Decoder
    from yggdrasil.engine.parity import ProbeText, measure_parity
    from yggdrasil.prompts import read_prompts

    requests = read_prompts(prompts, limit, chat=chat)  # before a model is loaded
    plan = plan_of(plan)
    decoder = Decoder.from_plan(plan, dtype=dtype, force_machine=force_machine)
    assert decoder.plan is not None
    texts = [ProbeText(name, tokens) for name, tokens in encode_prompts(decoder, requests, max_prompt_tokens).items()]
    with PhaseProgress() as progress:
        report, found = measure_parity(decoder.assembly, texts, max_new_tokens, progress.phase("parity"))
    report = replace(report, model=public_source(decoder.plan.target.source))
    if dump_mismatches is not None:
        lines = "".join(json.dumps(asdict(mismatch)) + "\n" for mismatch in found)
        write_atomic(dump_mismatches, lines.encode())
    folder = out or resolve_plan(plan, current_machine(), force=force_machine).parent / decoder.plan.predictor
    _show(report)
    print(f"tolerance {report.tolerance:g} logits, written to {report.save(folder).resolve()}")


def _show(report: "ParityReport") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("width", "positions", "top-1 flips", "widest lead lost", "largest difference", "mean")
    table.title = f"{escape(report.model)}, {report.dtype}, {report.kernels} kernels: against width 1, in logits"
    for width in report.widths:
        table.add_row(
            str(width.width), str(width.positions), str(width.flips), f"{width.largest_flip_margin:.4g}",
            f"{width.largest_difference:.4g}", f"{width.mean_difference:.2g}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    if report.worst:
        layers = Table("layer", "largest difference", "of the largest state")
        layers.title = f"worst: {escape(report.worst_position)}"
        for layer in report.worst:
            layers.add_row(str(layer.layer), f"{layer.largest_difference:.4g}", f"{layer.relative:.2%}")
        console.print(layers)
