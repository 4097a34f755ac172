"""``yggdrasil bench rules`` and ``bench exactness``: compare acceptance rules and exactness modes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from yggdrasil.cli import checks
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.shared_options import ChatOption, Dtype, ForceOption, ModelArgument
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.bench.rules import Group
    from yggdrasil.engine.decoder import Decoder
    from yggdrasil.prompts import Prompt

Prompts = Annotated[
    list[Path],
    typer.Option(callback=checks.input_file, help="A prompt set, JSON lines; can be repeated."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts per set.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt; the first is the prefill's.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Keep at most so many last tokens of a prompt.")]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Dtype of both models. Default: the plan's.")]
Out = Annotated[
    Path | None,
    typer.Option("--json", callback=checks.output_file, help="File of samples and summary; its samples are reused."),
]


def rules(
    plan: ModelArgument,
    prompts: Prompts,
    limit: Limit = None,
    max_new_tokens: NewTokens = 64,
    max_prompt_tokens: PromptTokens = 256,
    temperatures: Annotated[str, typer.Option(callback=checks.temperatures, help="Temperatures, such as 0,1.")] = "0,1",
    dtype: DtypeOption = None,
    out: Out = None,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Compare every acceptance rule with plain decoding, prompt by prompt."""
    values = list(dict.fromkeys(float(value) for value in temperatures.split(",")))
    from yggdrasil.bench.rules import rule_group

    found = _read(prompts, limit, chat=chat)
    decoder = _open(plan_of(plan), dtype, force_machine=force_machine)
    rows = _measure(
        decoder, [rule_group(decoder, value) for value in values], prompts, found, limit,
        {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens, "chat": chat}, out,
    )  # fmt: skip
    _show(
        rows,
        ("lossless", lambda row: "yes" if row["lossless"] else "NO"),
        ("AAL", lambda row: f"{row['aal']:.2f}"),
        ("of plain's time", lambda row: f"{row['ratio_to_ours']['median']:.2f}"),
        ("repeats", lambda row: f"{row['repeats']:.0%}"),
    )


def exactness(
    plan: ModelArgument,
    prompts: Prompts,
    limit: Limit = None,
    max_new_tokens: NewTokens = 64,
    max_prompt_tokens: PromptTokens = 256,
    tolerance: Annotated[
        float | None,
        typer.Option(callback=checks.finite, help="Leads below this are near ties, in logits. Default: the plan's."),
    ] = None,
    dtype: DtypeOption = None,
    out: Out = None,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Compare every exactness mode: tokens with plain decoding, and speed with `fast`.

    The exit code is 1 if `strict` or `fixed-width` differs from plain decoding.
    """
    from yggdrasil.bench.rules import EQUAL_TO_PLAIN, mode_group

    found = _read(prompts, limit, chat=chat)
    decoder = _open(plan_of(plan), dtype, force_machine=force_machine)
    if tolerance is None and decoder.tolerance is None:
        raise YggdrasilError(
            f"strict needs the tolerance of {plan} on this machine; measure it with `yggdrasil parity {plan} "
            "--prompts FILE`, or give --tolerance"
        )
    settings = {
        "max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens, "chat": chat,
        "tolerance": decoder.tolerance if tolerance is None else tolerance,
    }  # fmt: skip
    rows = _measure(decoder, [mode_group(decoder, tolerance)], prompts, found, limit, settings, out)
    _show(
        rows,
        ("as its plain", lambda row: f"{row['same_as_plain']} of {row['prompts']}"),
        ("mismatches", lambda row: str(row["verify_decode_mismatches"])),
        ("near ties", lambda row: str(row["near_ties"])),
        ("flips", lambda row: str(row["flips"])),
        ("AAL", lambda row: f"{row['aal']:.2f}"),
        ("of fast's speed", lambda row: f"{1 / row['ratio_to_ours']['median']:.3f}"),
        ("repeats", lambda row: f"{row['repeats']:.0%}"),
    )
    if any(row["verify_decode_mismatches"] for row in rows if row["system"] in EQUAL_TO_PLAIN):
        raise typer.Exit(1)


def _read(files: list[Path], limit: int | None, *, chat: bool) -> "list[Prompt]":
    """Return the prompts of all sets."""
    from yggdrasil.prompts import read_prompt_sets

    return read_prompt_sets(files, limit, chat=chat)


def _open(plan: str, dtype: Dtype | None, *, force_machine: bool) -> "Decoder":
    from yggdrasil.engine.decoder import Decoder

    return Decoder.from_plan(plan, dtype=dtype, force_machine=force_machine)


def _measure(
    decoder: "Decoder",
    groups: "list[Group]",
    files: list[Path],
    prompts: "list[Prompt]",
    limit: int | None,
    settings: dict[str, Any],
    out: Path | None,
) -> list[dict[str, Any]]:
    from yggdrasil.bench.record import pair_settings
    from yggdrasil.bench.rules import summarise_group
    from yggdrasil.bench.store import SampleFile, measure
    from yggdrasil.bench.systems import encode_prompts
    from yggdrasil.cli.progress import PhaseProgress

    assert decoder.plan is not None
    systems = [system for group in groups for system in group.systems]
    texts = encode_prompts(decoder, prompts, settings["max_prompt_tokens"])
    dtype = str(decoder.assembly.target.loaded.dtype).removeprefix("torch.")
    described = {
        **pair_settings(decoder.plan, dtype), **settings, "prompts_files": [path.name for path in files],
        "limit": limit, "systems": [system.name for system in systems],
    }  # fmt: skip
    file = SampleFile(out, described)
    with PhaseProgress() as progress:
        report = progress.phase(f"{len(systems)} modes, {len(texts)} prompts")
        samples = measure(systems, texts, settings["max_new_tokens"], file, report)
    rows = [row for group in groups for row in summarise_group(group, samples)]
    file.save(rows)
    return rows


def _show(rows: list[dict[str, Any]], *columns: tuple[str, Callable[[dict[str, Any]], str]]) -> None:
    from rich.table import Table

    from yggdrasil.bench.spread import describe
    from yggdrasil.cli.progress import wide_console

    table = Table("mode", *(title for title, _ in columns), "ms per token (quartiles)")
    for row in rows:
        table.add_row(row["system"], *(text(row) for _, text in columns), describe(row["tpot_ms"], 3))
    wide_console().print(table)
