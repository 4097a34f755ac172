"""``yggdrasil search``: finds the fastest schedule on this machine."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from yggdrasil.cli import checks
from yggdrasil.cli.open_decoder import plan_of
from yggdrasil.cli.shared_options import ChatOption, ForceOption, ModelArgument
from yggdrasil.errors import Interrupted


def search(
    profile: ModelArgument,
    prompts: Annotated[
        Path | None,
        typer.Option(
            callback=checks.input_file, help="JSON lines with a prompt field; without it nothing is measured."
        ),
    ] = None,
    objective: Annotated[
        Literal["latency", "aal"], typer.Option(help="aal: maximise accepted length alone, for comparison.")
    ] = "latency",
    save_as: Annotated[
        str | None, typer.Option(callback=checks.name, help="Name of the plan to write. Default: the profile's.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of best predictions to measure.")] = 10,
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts, evenly spread over the file.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=4, help="Tokens to generate per prompt.")] = 48,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Keep at most so many last tokens of a prompt.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every plan decodes every prompt.")] = 5,
    final_rounds: Annotated[int, typer.Option(min=0, help="Further times for the fastest and the paper's plans.")] = 15,
    minutes: Annotated[
        int, typer.Option(min=1, help="Most minutes to measure; every plan decodes at least one prompt.")
    ] = 30,
    measure_again: Annotated[
        bool, typer.Option("--measure-again", help="Measure stages even if the profile has samples.")
    ] = False,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Rank all schedules, shapes and widths by predicted latency, measure the best, and write the fastest plan."""
    from yggdrasil.calibration.search import SearchSettings, search_schedules
    from yggdrasil.cli.progress import PhaseProgress

    settings = SearchSettings(
        plan_of(profile), prompts, objective, save_as, top, limit, max_new_tokens, max_prompt_tokens, rounds,
        final_rounds, minutes=minutes, measure_again=measure_again, chat=chat, force_machine=force_machine,
    )  # fmt: skip
    try:
        with PhaseProgress() as progress:
            path = search_schedules(settings, progress)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; stage samples that were finished are kept, run the same command again"
        ) from None
    _show(path)


def _show(path: Path) -> None:
    from rich.table import Table

    from yggdrasil.cli.progress import wide_console
    from yggdrasil.reports.schedules import changed_variants, verdict
    from yggdrasil.scheduling.plan import Plan

    plan = Plan.load(path)
    assert plan.search is not None
    table = Table(title=f"Schedules for {plan.name}, objective {plan.search.objective}; milliseconds")
    for column in ("plan", "variants", "tree", "iteration", "measured", "per token", "measured", "speed-up"):
        table.add_column(column)
    for entry in plan.search.entries:
        mark = " *" if entry.name == plan.search.chosen else ""
        figures = (
            entry.predicted_iteration_ms, entry.measured_iteration_ms, entry.predicted_ms_per_token,
            entry.measured_ms_per_token, entry.measured_speedup,
        )  # fmt: skip
        shown = ["" if figure is None else f"{figure:.3g}" for figure in figures]
        table.add_row(f"{entry.name}{mark}", changed_variants(entry), " x ".join(map(str, entry.shape)), *shown)
    wide_console().print(table)
    for line in verdict(plan.search):
        print(line)
    print(path)
