"""``yggdrasil plans``: lists the plans."""

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from yggdrasil.errors import YggdrasilError


def plans(
    name: Annotated[str | None, typer.Argument(help="List the plans of this name, of every machine.")] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove this machine's plan NAME with its measurements and predictor.")
    ] = False,
    fits: Annotated[
        bool, typer.Option("--fits", help="Print nothing; exit with 0 if a plan is for this machine, else with 1.")
    ] = False,
) -> None:
    """List the plans of this machine; with NAME the plans of that name of every machine. Or remove one."""
    from yggdrasil.artifacts import current_machine, list_plans
    from yggdrasil.artifacts.parsing import close_match

    machine, entries = current_machine(), list_plans(name)
    if fits:
        raise typer.Exit(0 if any(entry.fits(machine) for entry in entries) else 1)
    if name is not None and not entries:
        names = sorted({entry.name for entry in list_plans()})
        there = f"the plans are: {', '.join(names)}" if names else "there are none yet"
        raise YggdrasilError(f"there is no plan named '{name}'{close_match(name, names)}; {there}")
    if remove:
        _remove(name, [entry.path for entry in entries if entry.fits(machine)])
        return
    if name is None:
        others = [entry for entry in entries if not entry.fits(machine)]
        entries = [entry for entry in entries if entry.fits(machine)]
        if others:
            listed = ", ".join(sorted({entry.name for entry in others}))
            print(f"of other machines: {listed}; `yggdrasil plans NAME` shows them", file=sys.stderr)
    if entries:
        _show([(entry.name, entry.path, entry.fits(machine)) for entry in entries])
    else:
        print("no plan of this machine yet; the first use of a model makes one", file=sys.stderr)


def _remove(name: str | None, paths: list[Path]) -> None:
    """Remove plans, their profiles, and those predictor folders that no other plan names.

    Raises:
        YggdrasilError: no name is given, or there is no plan of that name for this machine.
    """
    from yggdrasil.artifacts import list_plans, shown
    from yggdrasil.artifacts.names import root_of

    if name is None or not paths:
        raise YggdrasilError(
            f"{'--remove needs the NAME of a plan' if name is None else f'{name} is a plan of other machines alone'}; "
            "`yggdrasil plans` lists those of this machine"
        )
    for path in paths:
        path.unlink()
        folders = [root_of(path) / kind / name / path.stem for kind in ("profiles", "predictors")]
        for folder in folders:
            if not any(entry.mentions(f"{folder.parent.parent.name}/{name}/{path.stem}") for entry in list_plans()):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in (path.parent, *(each.parent for each in folders)):
            with suppress(OSError):  # other machines' files are there
                folder.rmdir()
        print(f"removed {shown(path)}")


def _show(entries: list[tuple[str, Path, bool]]) -> None:
    from rich.table import Table

    from yggdrasil.cli.progress import wide_console

    table = Table("plan", "model", "drafters", "expected", "machine", box=None)
    for name, path, fits in entries:
        model, drafters, expected = _content(path)
        table.add_row(name, model, drafters, expected, "this one" if fits else path.stem)
    wide_console().print(table, markup=False)


def _content(path: Path) -> tuple[str, str, str]:
    """Return model, drafters and expected speed-up of a plan file as texts; the last says if the file is damaged."""
    from yggdrasil.drafters.registry import names_of
    from yggdrasil.errors import ArtifactError
    from yggdrasil.scheduling.plan import Plan

    try:
        plan = Plan.load(path)
    except ArtifactError:
        return "", "", "damaged, or of an older version"
    second = [] if plan.drafter is None else [Path(plan.drafter.source).name]
    expected = "first use" if plan.is_provisional else f"{plan.predicted.speedup:.2f} x"
    return Path(plan.target.source).name, " + ".join([*second, *sorted(names_of(plan.model_free))]), expected
