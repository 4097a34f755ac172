"""``yggdrasil export``: speculation settings for another engine."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from yggdrasil.cli import checks
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.shared_options import ChatOption, ForceOption, ModelArgument
from yggdrasil.errors import YggdrasilError


def export(
    plan: ModelArgument,
    to: Annotated[Literal["llama-server", "vllm", "sglang"], typer.Option(help="The engine.")],
    url: Annotated[
        str | None, typer.Option(help="A llama-server with the target, started without speculation, to measure.")
    ] = None,
    drafter_url: Annotated[str | None, typer.Option(help="A llama-server with the plan's draft model.")] = None,
    costs: Annotated[
        Path | None,
        typer.Option(callback=checks.input_file, help="A JSON file with pass times, instead of measuring them."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            callback=checks.input_file,
            help="Prompts for the server; lookups are simulated on its answers. Default: on text of the calibration.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts, evenly spread over the file.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Keep at most so many last tokens of a prompt.")] = 256,
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=checks.output_file, help="Also write settings, costs and remarks here."),
    ] = None,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Print another engine's speculation options with the best predicted speed; remarks go to standard error."""
    from yggdrasil.artifacts import current_machine, resolve_plan, write_atomic

    name = plan_of(plan)
    resolve_plan(name, current_machine(), force=force_machine)
    if costs is None and url is None:  # said before PyTorch is imported, which takes seconds
        raise YggdrasilError(
            "export needs what the engine's passes cost: give --costs FILE, or --url of a llama-server"
        )

    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.export.exporting import Exported, Request
    from yggdrasil.export.exporting import export as choose

    request = Request(
        name, to, url, drafter_url, costs, prompts, chat=chat, limit=limit, tokens=max_new_tokens,
        prompt_tokens=max_prompt_tokens, force_machine=force_machine,
    )  # fmt: skip
    with PhaseProgress() as progress:
        found: Exported = choose(request, progress)
    if out is not None:
        write_atomic(out, (json.dumps(found.as_dict(), indent=1) + "\n").encode())
    print(found.settings.line)
    predicted = found.settings.predicted
    said = [
        f"{found.settings.method}: {predicted.ms_per_token:.3g} ms per token predicted, "
        f"{predicted.speedup:.2f} x plain, accepted length {predicted.aal:.2f}",
        *found.remarks,
        *(f"not said by these options: {each}" for each in found.not_said),
    ]
    print("\n".join(said), file=sys.stderr)
