#!/usr/bin/env python3
"""Decode with every kind of drafter for every family of targets, in trees of all shapes, and compare the tokens.

    OMP_NUM_THREADS=1 scripts/check_drafters.py --csv docs/results/drafters.csv

Targets are small random models in float32, drafters know much of their text (``tests/every_drafter.py``). Every
iteration takes another tree. Greedy tokens of a first and a later turn must be those of transformers' ``generate``, and
sampled ones those of plain decoding with the same seed. A cell has the tokens an iteration, greedy and sampled, or
what is wrong. "usual" are native steps where the family has them and transformers' code elsewhere, "captured" the code
that a GPU captures, run on the CPU. Exit code 1 if anything is wrong. --merge keeps the rows of the file that are not
tried now.
"""

import csv
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging as transformers_logging

from yggdrasil.cli import run_script
from yggdrasil.errors import YggdrasilError, one_line

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
BACKENDS = {"usual": "", "captured": "cudagraph"}
Row = dict[str, str]


def cell(family: str, kind: str, folder: Path, backend: str) -> str:
    """Return tokens an iteration, "greedy / sampled"; what is wrong begins with "wrong"."""
    from every_drafter import check

    try:
        found = check(family, kind, folder, BACKENDS[backend])
    except YggdrasilError as error:
        return f"refused: {one_line(error)}"
    except Exception as error:  # noqa: BLE001  (what is to be found)
        return f"wrong: {type(error).__name__}: {one_line(error)[:160]}"
    return f"wrong: {found.fault}" if found.fault else f"{found.greedy:.1f} / {found.drawn:.1f}"


def write(table: Path, kinds: Sequence[str], rows: Sequence[Row], *, merge: bool) -> None:
    """Write the rows, sorted; with ``merge`` keep the file's cells that were not tried now."""
    kept: dict[tuple[str, str], Row] = {}
    if merge and table.exists():
        with table.open(newline="") as file:
            kept = {(row["family"], row["steps"]): row for row in csv.DictReader(file)}
    for row in rows:
        kept[row["family"], row["steps"]] = kept.get((row["family"], row["steps"]), {}) | row
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["family", "steps", *kinds], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[key] for key in sorted(kept))


def main(
    only: Annotated[list[str] | None, typer.Argument(help="Families by the tests' names; all unless given.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Only this kind of drafter.")] = None,
    steps: Annotated[list[str] | None, typer.Option(help=f"Only this one of {', '.join(BACKENDS)}.")] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Write the table there.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Keep the file's cells that are not tried now.")] = False,
) -> None:
    """Decode with every kind of drafter for every family, and compare the tokens."""
    from every_drafter import FAMILIES, KINDS, kinds_of

    for option, names, known in ("family", only, FAMILIES), ("--drafter", drafter, KINDS), ("--steps", steps, BACKENDS):
        if unknown := [name for name in names or () if name not in known]:
            raise YggdrasilError(f"{option} {unknown[0]!r} is not there; choose from {', '.join(known)}")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for family in only or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            for backend in steps or BACKENDS:
                row = {"family": family, "steps": backend}
                row |= {
                    kind: cell(family, kind, Path(folder), backend)
                    for kind in kinds_of(family)
                    if not drafter or kind in drafter
                }
                rows.append(row)
                wrong = [f"{kind}: {found}" for kind, found in row.items() if found.startswith(("wrong", "refused"))]
                typer.echo(f"{family:16} {backend:8} {len(row) - 2} drafters; {'; '.join(wrong) or 'equal tokens'}")
        if table is not None:
            write(table, list(KINDS), rows, merge=merge)
    raise typer.Exit(any(found.startswith("wrong") for row in rows for found in row.values()))


if __name__ == "__main__":
    run_script(main, "check_drafters")
