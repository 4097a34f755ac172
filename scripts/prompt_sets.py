"""Several prompt files in one comparison."""

from collections.abc import Sequence
from pathlib import Path

from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import Prompt, check_ids, read_prompts


def read_prompt_sets(paths: Sequence[Path], limit: int | None = None, *, chat: bool = False) -> list[Prompt]:
    """Read the first ``limit`` prompts of each file and concatenate them.

    Raises:
        YggdrasilError: if a file is invalid (``read_prompts``), or two prompts have the same id.
    """
    prompts = [prompt for path in paths for prompt in read_prompts(path, limit, chat=chat)]
    check_ids(prompts)
    return prompts


def sets_by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Return prompt files by name (file name without suffix). Raises YggdrasilError if two have the same name."""
    named: dict[str, Path] = {}
    for path in paths:
        if path.stem in named:
            raise YggdrasilError(f"{named[path.stem]} and {path} are both called {path.stem}; rename one")
        named[path.stem] = path
    return named
