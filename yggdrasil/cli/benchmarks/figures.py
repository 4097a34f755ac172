"""``yggdrasil bench figures``: measures the paper's figures on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from yggdrasil.cli import checks
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.shared_options import ChatOption, ForceOption, ModelArgument
from yggdrasil.errors import YggdrasilError


def figures(
    out: Annotated[
        Path,
        typer.Option(
            callback=checks.output_folder,
            help="Folder for CSV, plots and samples (data/), which are reused.",
        ),
    ],
    plan: ModelArgument,
    prompts: Annotated[
        list[Path],
        typer.Option(callback=checks.input_file, help="A prompt set, JSON lines; can be repeated."),
    ],
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure of the paper; can be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use few prompts, tokens and widths.")] = False,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Measure and draw the paper's figures 4, 5, 6 and 10 to 15."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise YggdrasilError("figures need matplotlib; install yggdrasil-decode[bench]") from None
    from dataclasses import replace

    from yggdrasil.bench.figures.context import QUICK, Effort, open_context
    from yggdrasil.bench.figures.draw import write_figure
    from yggdrasil.bench.figures.registry import FIGURES, chosen_figures
    from yggdrasil.cli.progress import PhaseProgress

    numbers = chosen_figures(figure or ())
    context = open_context(
        plan_of(plan), prompts, out, replace(QUICK if quick else Effort(), chat=chat), force_machine=force_machine
    )
    console = Console(stderr=True)
    with PhaseProgress() as progress:
        context.report_to(progress)
        for number in numbers:
            for made in FIGURES[number](context):
                for path in write_figure(made, out, context.caption()):
                    console.print(str(path), markup=False)
