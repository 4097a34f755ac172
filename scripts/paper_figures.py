#!/usr/bin/env python3
"""Measure and draw the paper's figures 4, 5, 6 and 10 to 15 on this machine.

    scripts/paper_figures.py mine --prompts unseen.jsonl --figure 14 --out figures

Writes a CSV and a plot per figure to --out, and all samples to --out/data, which are reused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from figures.context import QUICK, Effort, open_context
from figures.draw import write_figure
from figures.registry import FIGURES, chosen_figures

from yggdrasil.arguments import check_package
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.progress import PhaseProgress


def main(
    plan: Annotated[str, typer.Argument(help="A plan with a draft model: a file or a name.")],
    out: Annotated[
        Path, typer.Option(callback=checks.output_folder, help="Folder for CSV, plots and samples (data/).")
    ],
    prompts: Annotated[
        list[Path], typer.Option(callback=checks.input_file, help="A prompt set, JSON lines; can be repeated.")
    ],
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure of the paper; can be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use few prompts, tokens and widths.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Plain prompts are turns of a chat.")] = False,
    force_machine: Annotated[bool, typer.Option("--force-machine", help="Use another machine's plan.")] = False,
) -> None:
    """Measure and draw the paper's figures."""
    check_package("matplotlib", "drawing", "bench")
    numbers = chosen_figures(figure or ())
    effort = replace(QUICK if quick else Effort(), chat=chat)
    context = open_context(plan, prompts, out, effort, force_machine=force_machine)
    with PhaseProgress() as progress:
        context.report_to(progress)
        for number in numbers:
            for made in FIGURES[number](context):
                for path in write_figure(made, out, context.caption()):
                    print(path)


if __name__ == "__main__":
    run_script(main, "paper_figures")
