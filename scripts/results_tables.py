#!/usr/bin/env python3
"""Write the tables and the figure of README and docs from the committed files they stand for.

    scripts/results_tables.py           # rewrite README.md and docs/*.md
    scripts/results_tables.py --check   # exit code 1 if a table differs from its files

A block stands between ``<!-- results: KIND -->`` and ``<!-- end of results -->``. What it says comes from
``profiles/NAME/MACHINE/``: bench-SET.json of `yggdrasil bench`, systems-SET.json of `scripts/compare_systems`,
equality-SET.json of `scripts/check_equality.py`, steps.json of `scripts/compare_steps`, turns.json and
first-contact.json of `scripts/measure_waiting.py`; the blocks about the predictor from ``plans/`` and ``predictors/``.
`scripts/measure_results` writes them all. A block whose files are not there says so.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from results import predictors, speed, steps, systems, waiting
from results.records import Result, caption, read_results

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
NOTHING = "_Not measured yet; `scripts/measure_results` makes it._"

TABLES: dict[str, tuple[str, Callable[[Sequence[Result]], str]]] = {  # block: the files' kind, what is made of them
    "bench": ("bench", speed.bench),
    "beside": ("bench", speed.beside),
    "categories": ("bench", speed.categories),
    "equality": ("equality", systems.equality),
    "figure": ("bench", speed.figure),
    "first-contact": ("first-contact", waiting.first_contact),
    "headline": ("bench", speed.headline),
    "reading": ("steps", steps.reading),
    "steps": ("steps", steps.steps),
    "systems": ("systems", systems.systems),
    "turns": ("turns", waiting.turns),
}
OF_ONE_MACHINE = {"figure"}  # the README shows that with most prompts
OF_ALL_MACHINES = {"headline"}  # in one table
FROM_PLANS: dict[str, Callable[[Path], str]] = {"policies": predictors.policies, "predictors": predictors.reports}


def render(text: str, root: Path) -> str:
    """``text`` with every block made anew from the files below ``root``; ValueError for a block of no known kind."""
    return MARKED.sub(lambda match: f"{match[1]}\n{block(match[2], root)}\n\n{match[3]}", text)


def block(name: str, root: Path) -> str:
    """What stands between the marks: tables, most of them one a machine, each with a line on how it was made."""
    if name in FROM_PLANS:
        return FROM_PLANS[name](root) or NOTHING
    if name not in TABLES:
        raise ValueError(f"there is no block {name!r}; choose from {', '.join(sorted({**TABLES, **FROM_PLANS}))}")
    kind, make = TABLES[name]
    found = list(read_results(root / "profiles", kind).values())
    if name in OF_ONE_MACHINE:
        found = sorted(found, key=lambda results: sum(each.record["prompts"] for each in results))[-1:]
    if name in OF_ALL_MACHINES and found:
        found = [[each for results in found for each in results]]
    made = [(make(results), caption(results)) for results in found]
    return "\n\n".join(f"{body}\n\n{line}" for body, line in made if body) or NOTHING


def pages(root: Path) -> list[Path]:
    """The documents that may hold blocks."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main() -> int:
    """Rewrite or check the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a table differs")
    options = parser.parse_args()
    texts = {page: page.read_text(encoding="utf-8") for page in pages(ROOT)}
    try:
        wanted = {page: render(text, ROOT) for page, text in texts.items()}
    except (ValueError, KeyError) as error:
        print(f"results_tables: {error}", file=sys.stderr)
        return 2
    changed = [page for page in texts if wanted[page] != texts[page]]
    for page in changed:
        if options.check:
            print(f"{page.relative_to(ROOT)} differs from the results; run scripts/results_tables.py", file=sys.stderr)
        else:
            page.write_text(wanted[page], encoding="utf-8")
            print(page.relative_to(ROOT))
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
