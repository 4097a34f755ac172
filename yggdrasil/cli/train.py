"""``yggdrasil train``: trains a head for a target."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from yggdrasil.artifacts import MOST_THREADS
from yggdrasil.cli import checks
from yggdrasil.cli.shared_options import TargetArgument
from yggdrasil.errors import Interrupted


def train(
    target: TargetArgument,
    out: Annotated[
        Path,
        typer.Option(callback=checks.output_folder, help="Folder of the drafter; OUT.training has the state."),
    ],
    kind: Annotated[
        Literal["eagle3", "dflash"],
        typer.Option(help="eagle3 reads its own tokens; dflash drafts a block of seven tokens in one pass."),
    ] = "eagle3",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            callback=checks.input_file,
            help="JSON lines with a prompt field, for the target to answer; can be repeated. Then it samples prompts.",
        ),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            callback=checks.input_file,
            help="Existing text to train on: .jsonl with prompt and answer, or messages; or plain text. Can be "
            "repeated. Then the target generates text only with --tokens or --prompts.",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="An EAGLE-3 head to start from, of a model of the same shape: a folder, or yggdrasil:NAME."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.0, callback=checks.finite, help="Duration of this run.")] = 60.0,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Generate text up to so many tokens, in at most 2/3 of the time. Default: 1/3 of the time.",
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of target and drafter.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, max=MOST_THREADS, help="Threads; 0: one per core.")] = 0,
) -> None:
    """Train a draft head for a model on text that the model generates or that exists.

    The same command resumes an interrupted training, or trains a finished one for more minutes.
    """
    from yggdrasil.artifacts.homes import expanded
    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.drafters.shipped_assets import resolve_shipped_head
    from yggdrasil.training.settings import TrainSettings
    from yggdrasil.training.training import train as run

    begun = None if start is None else expanded(resolve_shipped_head(start))
    settings = TrainSettings(
        target, out.absolute(), kind, tuple(prompts or ()), tuple(texts or ()), minutes, tokens, threads, begun, device
    )
    try:
        with PhaseProgress() as progress:
            print(run(settings, progress))
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was learned is kept, run the same command again to go on") from None
