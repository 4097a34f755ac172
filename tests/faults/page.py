"""A page of the documentation whose sections are each written by a command of their own."""

import re
from collections.abc import Sequence
from pathlib import Path

HEAD = """# Injected faults

Every section is written by the command that it names (`scripts/inject_faults --help`), with what it found.
"""


def write_section(page: Path, title: str, command: str, made_of: str, lines: Sequence[str]) -> None:
    """Replace the section ``title`` of the page, or add it; the others stay."""
    text = page.read_text() if page.exists() else HEAD
    found = re.split(r"^(?=## )", text if text.startswith(HEAD) else HEAD, flags=re.MULTILINE)
    sections = {part.splitlines()[0].removeprefix("## "): part for part in found[1:]}
    body = [f"## {title}", "", f"`{command}`, {made_of}.", "", *lines]
    sections[title] = "\n".join(body).rstrip() + "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([HEAD, *(part.rstrip() + "\n" for part in sections.values())]))
