#!/usr/bin/env python3
"""Print functions of the package as a stranger would meet them: signature and docstring, without the body.

    scripts/sample_docstrings.py                     # thirty functions, drawn with seed 0
    scripts/sample_docstrings.py --seed 7 --count 10

Private functions and those without a docstring are not drawn. Read each and say what it does, what it takes and what it
returns without opening another file; then look.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "yggdrasil"


def functions(package: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, line and class; text) of every public function with a docstring, in the order of files."""
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        owners = {
            id(member): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for member in node.body
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                owner = f" of class {owners[id(node)]}" if id(node) in owners else ""
                yield f"{file.relative_to(package.parent)}:{node.lineno}{owner}", _without_body(node)


def _without_body(node: ast.FunctionDef) -> str:
    """The decorators, the signature and the docstring."""
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": node.body[:1]})
    return ast.unparse(ast.fix_missing_locations(bare))


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="functions to draw")
    options = parser.parse_args()
    found = list(functions(PACKAGE))
    drawn = random.Random(options.seed).sample(found, min(options.count, len(found)))
    for number, (where, text) in enumerate(drawn, start=1):
        print(f"--- {number}. {where}\n{text}\n")


if __name__ == "__main__":
    main()
