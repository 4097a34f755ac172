"""``yggdrasil cache``: what is compiled and kept of models on this machine, and how much of the disk it takes."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from yggdrasil.errors import YggdrasilError, first_line

# All that is made again in seconds. Plans, the text that targets wrote for minutes, and counts of use stay.
FOLDERS = ("kernels", "steps", "models", "heads", "tokenizers")


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it; it is made again when needed.")] = False,
) -> None:
    """List, size or clear compiled steps, kernels and models as they are kept (YGGDRASIL_CACHE moves them)."""
    from yggdrasil.artifacts.atomic import followed
    from yggdrasil.artifacts.cache import cache_root

    root = cache_root()
    total = 0
    for folder in FOLDERS:
        place = followed(root / folder)
        sizes = _sizes(place)
        size = sum(sizes.values())
        total += size
        print(f"{folder}: {len(sizes)} files, {size / 1e6:.1f} MB in {place}")
        if not clear:
            for path, own in sorted(sizes.items()):
                print(f"  {own / 1e6:8.2f} MB  {path.relative_to(place)}")
        elif place.exists():
            try:
                shutil.rmtree(place)
                if (root / folder).is_symlink():
                    place.mkdir()  # what the link points at
            except OSError as error:
                reason = error.strerror or first_line(error)
                raise YggdrasilError(f"cannot clear {place} ({reason}); check its permissions") from error
    print(f"{'cleared' if clear else 'in all'}: {total / 1e6:.1f} MB")


def _sizes(place: Path) -> dict[Path, int]:
    """Bytes of every file below ``place``; other processes' temporary ones may be gone before they are looked at."""
    sizes = {}
    for folder, _, names in os.walk(place):
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                sizes[path] = path.stat().st_size
    return sizes
