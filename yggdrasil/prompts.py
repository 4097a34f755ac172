"""Prompt files: JSON lines with a ``prompt`` field, and perhaps an ``id`` and a ``category``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yggdrasil.errors import YggdrasilError


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file."""

    id: str
    prompt: str
    category: str | None = None


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts in order; every fault names the file and the line.

    Raises:
        YggdrasilError: no such file, not JSON lines, no ``prompt`` in a line, or nothing at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines also splits at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise YggdrasilError(
            f"the prompt file {path} cannot be read ({error}); give JSON lines with a prompt field"
        ) from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise YggdrasilError(f"{path}, line {number} is not JSON ({error.msg}); give one object a line") from error
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise YggdrasilError(f"{path}, line {number} has no text in a field named prompt")
        category = record.get("category")
        name = None if category is None else str(category)
        prompts.append(Prompt(str(record.get("id", number)), record["prompt"], name))
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        raise YggdrasilError(f"{path} holds no prompts; give JSON lines with a prompt field")
    return prompts


def read_prompt_sets(paths: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of each file, one file after the other.

    Raises:
        YggdrasilError: as ``read_prompts``, or two prompts that share an id.
    """
    prompts = [prompt for path in paths for prompt in read_prompts(path, limit)]
    ids = [prompt.id for prompt in prompts]
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise YggdrasilError(f"two prompts have the id {twice}; ids tell samples apart, so give each its own")
    return prompts
