"""``yggdrasil search``: the schedule that wins on this machine."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from yggdrasil.cli import checks
from yggdrasil.cli.model_argument import plan_of, takes_model
from yggdrasil.cli.shared_options import ChatOption, ForceOption
from yggdrasil.errors import Interrupted


@takes_model("profile", checks.name)
def search(
    profile: str,
    prompts: Annotated[
        Path | None,
        typer.Option(
            callback=checks.input_file, help="JSON lines with a prompt field; without them nothing is measured."
        ),
    ] = None,
    objective: Annotated[
        Literal["latency", "aal"], typer.Option(help="aal: accepted length alone, for comparison.")
    ] = "latency",
    save_as: Annotated[
        str | None,
        typer.Option(callback=checks.name, help="Name of the plan to write; the profile's if not given."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Best predictions that are measured.")] = 10,
    limit: Annotated[int, typer.Option(min=1, help="Prompts decoded by each plan, spread over the file.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=4, help="Tokens generated on each.")] = 48,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Keep only the last so many tokens of a prompt.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Times every prompt is decoded by every plan.")] = 5,
    final_rounds: Annotated[
        int, typer.Option(min=0, help="Times more by the best of them, in turns with the paper's plans.")
    ] = 15,
    measure_again: Annotated[
        bool, typer.Option("--measure-again", help="Take new stage samples even where the profile has them.")
    ] = False,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Rank all schedules, shapes and widths by predicted latency, measure the best, write the plan that wins."""
    from yggdrasil.calibration.search import SearchSettings, search_schedules
    from yggdrasil.cli.progress import PhaseProgress

    settings = SearchSettings(
        plan_of(profile), prompts, objective, save_as, top, limit, max_new_tokens, max_prompt_tokens, rounds,
        final_rounds, measure_again=measure_again, chat=chat, force_machine=force_machine,
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
    for column in ("plan", "what differs", "tree", "iteration", "measured", "a token", "measured", "speed-up"):
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
