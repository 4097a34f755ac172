"""README and docs as tests read them: pages, fenced blocks, commands."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One fenced block; ``name`` tells a person where it stands."""

    name: str
    language: str
    text: str


def blocks(language: str) -> list[Block]:
    """Every block of one language, page by page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCED.finditer(text):
            line = text[: match.start()].count("\n") + 1
            if match[1] == language:
                found.append(Block(f"{page.name}:{line}", language, match[2]))
    return found


def commands() -> list[tuple[str, list[str]]]:
    """Every command line of every shell block, comments cut off: (where it stands, its words)."""
    return [
        (block.name, words)
        for block in blocks("bash")
        for line in block.text.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))
    ]
