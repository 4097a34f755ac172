"""Inject faults into everything that a command reads, and sum up what came of it in docs/faults.md.

    scripts/inject_faults
    scripts/inject_faults --kind plan --cases 50 --page other.md

Interrupted, the same command goes on where it stopped. A case is made again by its kind and seed, which every result
in results.jsonl holds.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]

from campaign import Log, Result, page, run_campaign  # noqa: E402
from kinds import SHARES  # noqa: E402

from yggdrasil.bench.record import provenance  # noqa: E402
from yggdrasil.cli import run_script  # noqa: E402
from yggdrasil.errors import YggdrasilError  # noqa: E402


def main(
    cases: Annotated[int, typer.Option(min=1, help="Cases in all, or of the one kind.")] = 1200,
    kind: Annotated[str | None, typer.Option(help=f"Only this kind: {', '.join(SHARES)}.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed of every kind.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="Where sandboxes and results lie; the user's cache if not given.")
    ] = None,
    page_file: Annotated[Path, typer.Option("--page", help="The page to write.")] = ROOT / "docs" / "faults.md",
) -> None:
    """Damage plans, predictors, profiles, checkpoints, prompt files, options, packages and kernels, at random."""
    from yggdrasil.artifacts.cache import cache_root

    if kind is not None and kind not in SHARES:
        raise YggdrasilError(f"--kind {kind} is not one of {', '.join(SHARES)}")
    place = folder or cache_root() / "faults"
    place.mkdir(parents=True, exist_ok=True)
    total = sum(SHARES.values())
    wanted = {kind: cases} if kind else {name: -(-cases * share // total) for name, share in SHARES.items()}
    log = Log(place / "results.jsonl")

    def report(result: Result) -> None:
        if not result.is_good:
            print(f"{result.kind} {result.seed} [{result.done}]: {result.verdict}", file=sys.stderr)

    run_campaign(place, wanted, seed, jobs, log, report)
    chosen = [result for result in log.results if result.kind in wanted]
    made_on = provenance()
    of = f"commit {str(made_on['commit'])[:12]}, torch {made_on['versions']['torch']}"
    page_file.parent.mkdir(parents=True, exist_ok=True)
    page_file.write_text(page(chosen, "scripts/inject_faults", of))
    wrong = sum(not result.is_good for result in chosen)
    print(f"{len(chosen)} faults, {wrong} with an outcome that should not be; see {page_file}")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    run_script(main, "inject_faults")
