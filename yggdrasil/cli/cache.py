"""``yggdrasil cache``: what is compiled on this machine, and how much of the disk it takes."""

import shutil
from typing import Annotated

import typer

from yggdrasil.errors import YggdrasilError


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it; it is compiled again when needed.")] = False,
) -> None:
    """List, size or clear the folder of compiled steps and kernels (YGGDRASIL_CACHE moves it)."""
    from yggdrasil.artifacts.cache import cache_root

    root = cache_root()
    total = 0
    for folder in ("kernels", "steps"):
        place = root / folder
        files = sorted(path for path in place.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        total += size
        print(f"{folder}: {len(files)} files, {size / 1e6:.1f} MB in {place}")
        if not clear:
            for path in files:
                print(f"  {path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(place)}")
        elif place.exists():
            try:
                shutil.rmtree(place)
            except OSError as error:
                raise YggdrasilError(f"cannot clear {place} ({error.strerror}); check its permissions") from error
    print(f"{'cleared' if clear else 'in all'}: {total / 1e6:.1f} MB")
