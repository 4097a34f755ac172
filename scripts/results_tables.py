#!/usr/bin/env python3
"""Write the tables of the documents from the rows in ``docs/results/``.

    scripts/results_tables.py                    # rewrite README.md and docs/results.md
    scripts/results_tables.py --check            # exit code 1 if a table differs from its rows
    scripts/results_tables.py --collect FILES    # first put the JSON files of benchmarks into docs/results/

A block stands between ``<!-- results: QUESTION -->`` and ``<!-- end of results -->``. `scripts/measure_results` runs
the benchmarks and collects what they write.
"""

import argparse
import re
import sys
from pathlib import Path

from results.questions import HEADLINE_MACHINE, NOTHING, QUESTIONS, Results, caption
from results.rows import collect

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "docs/results"
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def render(text: str, root: Path) -> str:
    """``text`` with every block made anew from ``root``/docs/results; ValueError for a block of no known question."""
    results = Results(root / FOLDER)
    return MARKED.sub(lambda match: f"{match[1]}\n{block(match[2], results)}\n\n{match[3]}", text)


def block(name: str, results: Results) -> str:
    """A table, and a line on how it was measured."""
    if name not in QUESTIONS:
        raise ValueError(f"there is no block {name!r}; choose from {', '.join(sorted(QUESTIONS))}")
    benchmark, make = QUESTIONS[name]
    made = make(results)
    line = caption(results, benchmark, HEADLINE_MACHINE if name == "headline" else "")
    return f"{made}\n\n{line}" if made else NOTHING


def pages(root: Path) -> list[Path]:
    """The documents that may hold blocks."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main() -> int:
    """Rewrite or check the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a table differs")
    parser.add_argument("--collect", nargs="+", type=Path, default=[], metavar="FILE", help="JSON files of benchmarks")
    options = parser.parse_args()
    texts = {page: page.read_text(encoding="utf-8") for page in pages(ROOT)}
    try:
        if options.collect:
            collect(options.collect, ROOT / FOLDER)
        wanted = {page: render(text, ROOT) for page, text in texts.items()}
    except ValueError as error:
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
