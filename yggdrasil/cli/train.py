"""``yggdrasil train``: a drafter for a target that has none."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from yggdrasil.artifacts import MOST_THREADS
from yggdrasil.cli import checks
from yggdrasil.cli.model_argument import takes_model
from yggdrasil.errors import Interrupted


@takes_model("target")
def train(
    target: str,
    out: Annotated[
        Path,
        typer.Option(callback=checks.output_folder, help="Folder of the drafter; beside it lies what it goes on from."),
    ],
    kind: Annotated[
        Literal["eagle3", "medusa", "draft-model"],
        typer.Option(
            help="eagle3: a layer on three of the target's states; medusa: heads on the last state, all depths in one "
            "pass; draft-model: a small Llama."
        ),
    ] = "eagle3",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            callback=checks.input_file,
            help="JSON lines with a prompt field, for the target to answer; can be repeated. Then it asks itself.",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="An EAGLE-3 head to begin as, of a model of the same shape: a folder, or yggdrasil:NAME."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.0, callback=checks.finite, help="How long this run may take.")] = 60.0,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Write text until there are so many tokens, for two thirds of the time at most; else for a third.",
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where the target writes and its drafter learns.")
    ] = "cpu",
    threads: Annotated[
        int, typer.Option(min=0, max=MOST_THREADS, help="Threads, 0 for as many as there are cores.")
    ] = 0,
) -> None:
    """Train a drafter for a model on text that the model writes itself.

    Interrupted, it goes on when run again; run once more, it trains for more minutes.
    """
    from yggdrasil.artifacts.homes import expanded
    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.drafters.shipped_assets import whole_name
    from yggdrasil.training.settings import TrainSettings
    from yggdrasil.training.training import train as run

    begun = None if start is None else expanded(whole_name(start))
    settings = TrainSettings(
        target, out.absolute(), kind, tuple(prompts or ()), minutes, tokens, threads, begun, device
    )
    try:
        with PhaseProgress() as progress:
            print(run(settings, progress))
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was learned is kept, run the same command again to go on") from None
