"""``yggdrasil bench``: compares a plan with plain decoding and other plans."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from yggdrasil.cli import checks
from yggdrasil.cli import sampling as opt
from yggdrasil.cli.open_decoder import open_decoder
from yggdrasil.cli.shared_options import (
    BackendOption,
    ChatOption,
    DeviceOption,
    DrafterOption,
    Dtype,
    ForceOption,
    ModelArgument,
)
from yggdrasil.errors import YggdrasilError


@opt.takes_sampling_options
def bench(
    plan: ModelArgument,
    prompts: Annotated[
        Path | None,
        typer.Option(callback=checks.input_file, help="JSON lines with a prompt field, not used in calibration."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 64,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Keep at most so many last tokens of a prompt.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of both models. Default: the plan's.")] = None,
    drafter: DrafterOption = "plan",
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=checks.output_file, help="Write every sample and the summary to this file."),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(help="Also compare with this plan of the same target, alternately; can be repeated."),
    ] = None,
    chat: ChatOption = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue chats after end-of-text, as plain prompts always do.")
    ] = False,
    force_machine: ForceOption = False,
    device: DeviceOption = None,
    backend: BackendOption = None,
    **options: Any,
) -> None:
    """Compare a plan with plain decoding, prompt by prompt; greedy by default.

    Plain prompts are continued by --max-new-tokens tokens. With --chat an answer ends where the model ends it, because
    text after its end is repetitive and so misleadingly fast. Both ways of decoding generate the same tokens.
    """
    if prompts is None:
        raise YggdrasilError("bench needs --prompts FILE: what is to be decoded")
    from yggdrasil.bench.memory import resident_mb
    from yggdrasil.cli.bench_output import compare_with_plain, open_decoders_by_name
    from yggdrasil.prompts import read_prompts

    sampling = opt.sampling_of(options)
    if not sampling.is_greedy and sampling.seed is None:
        sampling = replace(sampling, seed=0)  # both ways of decoding then generate the same tokens
    requests = read_prompts(prompts, limit, chat=chat)
    imports_mb = resident_mb()
    decoder = open_decoder(plan, dtype, drafter, force_machine=force_machine, device=device, backend=backend)
    settings = {
        "dtype": dtype or (decoder.plan.dtype if decoder.plan else None),
        **({} if drafter == "plan" else {"drafter": drafter}),
        "prompts_file": prompts.name,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "chat": chat,
        "ignore_eos": ignore_eos or not chat,
        **({"sampling": changed} if (changed := opt.changed(sampling)) else {}),
    }
    others = open_decoders_by_name(beside or (), dtype, force_machine=force_machine, device=device, backend=backend)
    compare_with_plain(decoder, requests, settings, out, imports_mb=imports_mb, beside=others, sampling=sampling)
