"""Inject faults into all that a command reads, kill commands, run many at once: see docs/research/faults.md.

    scripts/inject_faults all
    scripts/inject_faults damage --kind plan --cases 50 --page other.md
    scripts/inject_faults kills --number 25

``damage``, interrupted, goes on where it stopped. A case is made again by its kind and seed, which every result in
results.jsonl holds. Each command writes its section of the page.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]

import campaign  # noqa: E402
import crowds  # noqa: E402
import kills as killing  # noqa: E402
from kinds import SHARES  # noqa: E402
from page import write_section  # noqa: E402
from stage import Stage  # noqa: E402

from yggdrasil.bench.record import provenance  # noqa: E402
from yggdrasil.cli.exit_codes import run_guarded  # noqa: E402
from yggdrasil.errors import YggdrasilError  # noqa: E402

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
Folder = Annotated[Path | None, typer.Option(help="Where sandboxes and results lie; the user's cache if not given.")]
PageFile = Annotated[Path, typer.Option("--page", help="The page to write a section of.")]
PAGE = ROOT / "docs" / "research" / "faults.md"


@app.command()
def damage(
    cases: Annotated[int, typer.Option(min=1, help="Cases in all, or of the one kind.")] = 1200,
    kind: Annotated[str | None, typer.Option(help=f"Only this kind: {', '.join(SHARES)}.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed of every kind.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    folder: Folder = None,
    page: PageFile = PAGE,
) -> None:
    """Damage plans, predictors, profiles, packages, kernels, checkpoints, GGUF and prompt files, options: at random."""
    if kind is not None and kind not in SHARES:
        raise YggdrasilError(f"--kind {kind} is not one of {', '.join(SHARES)}")
    total = sum(SHARES.values())
    wanted = {kind: cases} if kind else {name: -(-cases * share // total) for name, share in SHARES.items()}
    place = _place(folder)
    log = campaign.Log(place / "results.jsonl", _commit())

    def report(result: campaign.Result) -> None:
        if not result.is_good:
            _say(f"{result.kind} {result.seed} [{result.done}]: {result.verdict}")

    campaign.run_campaign(place, wanted, seed, jobs, log, report)
    chosen = [result for result in log.results if result.kind in wanted]
    wrong = [result.verdict for result in chosen if not result.is_good]
    _finish(page, "Damage", f"damage --cases {cases}", campaign.section(chosen), f"{len(chosen)} faults", wrong)


@app.command()
def kills(
    number: Annotated[int, typer.Option(min=1, help="Kills of each command, of two.")] = 25,
    seed: Annotated[int, typer.Option(min=0, help="Of the moments.")] = 0,
    folder: Folder = None,
    page: PageFile = PAGE,
) -> None:
    """Kill a calibration and a first decoding at random moments; the next run goes on from what was complete."""
    sandbox = killing.Killing(Stage(_place(folder)), Random(seed))
    tallies = {title: sandbox.run(title, number, _say) for title in killing.COMMANDS}
    wrong = [each for tally in tallies.values() for each in tally.wrong]
    killed = sum(tally.kills for tally in tallies.values())
    _finish(page, "Kills", f"kills --number {number}", killing.section(tallies), f"{killed} kills", wrong)


@app.command()
def together(
    number: Annotated[int, typer.Option(min=1, help="Processes, and threads of one process.")] = 8,
    folder: Folder = None,
    page: PageFile = PAGE,
) -> None:
    """Decode with many processes on one plan, and with many threads on one decoder."""
    wrong = crowds.together(Stage(_place(folder)), number)
    said = f"{number} processes on one plan, then {number} threads on one decoder: {len(wrong)} with other tokens."
    _finish(page, "Together", f"together --number {number}", [said], f"{number} processes and threads", wrong)


@app.command()
def memory(folder: Folder = None, page: PageFile = PAGE) -> None:
    """Decode 10,000 prompts of one file and watch the memory that is resident."""
    resident = crowds.memory(Stage(_place(folder)))
    rows = [f"| {size:,} | {mb:.0f} |" for size, mb in resident.items()]
    lines = ["One process, one file.", "", "| prompts | resident MB |", "|---|---|", *rows]
    sizes = sorted(resident)
    grown = resident[sizes[-1]] - resident[sizes[0]]
    wrong = (
        [f"{grown:.0f} MB more after {sizes[-1]} prompts than after {sizes[0]}"] if grown > crowds.ALLOWED_MB else []
    )
    _finish(page, "Memory", "memory", lines, f"{sizes[-1]} prompts", wrong)


@app.command(name="all")
def all_of_them(folder: Folder = None, page: PageFile = PAGE) -> None:
    """Every one of these, whole, one after the other."""
    codes = []
    for command in (together, memory, damage, kills):
        try:
            command(folder=folder, page=page)
        except typer.Exit as ended:
            codes.append(ended.exit_code)
    raise typer.Exit(max(codes))


def _place(folder: Path | None) -> Path:
    from yggdrasil.artifacts.cache import cache_root

    place = folder or cache_root() / "faults"
    place.mkdir(parents=True, exist_ok=True)
    return place.resolve()


def _finish(page: Path, title: str, command: str, lines: Sequence[str], what: str, wrong: Sequence[str]) -> None:
    made_on = provenance()
    of = f"commit {_commit()}, torch {made_on['versions']['torch']}"
    write_section(page, title, f"scripts/inject_faults {command}", of, lines)
    for each in wrong:
        _say(each)
    print(f"{what}, {len(wrong)} with an outcome that should not be; see {page}")
    raise typer.Exit(1 if wrong else 0)


def _commit() -> str:
    return str(provenance()["commit"])[:12]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_guarded(lambda: app, "inject_faults")
