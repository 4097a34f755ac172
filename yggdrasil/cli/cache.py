"""``yggdrasil cache``: lists and clears compiled steps, kernels and packed models."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from yggdrasil.errors import YggdrasilError, first_line

MODELS = "models"  # a folder for each model, named by its fingerprint
# Folders of files that are rebuilt in seconds. Plans, generated texts and n-gram counts are not cleared.
FOLDERS = ("kernels", "steps", "captures", MODELS, "heads", "tokenizers")


def cache(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Only the files of this model: its name or fingerprint in the list, its path or its hub id.",
        ),
    ] = None,
    clear: Annotated[
        bool,
        typer.Option(
            "--clear", help="Remove the listed files, which are rebuilt when needed; n-gram counts of answers stay."
        ),
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the n-gram counts of answers; with MODEL only its own.")
    ] = False,
) -> None:
    """List or clear the cached files of models, with their sizes. YGGDRASIL_CACHE moves the cache."""
    from yggdrasil.artifacts.atomic import resolve_link
    from yggdrasil.artifacts.cache import cache_root

    root = cache_root()
    if forget:
        _forget(model)
        if not clear:
            return
    models = _by_model(resolve_link(root / MODELS))
    if model is not None:
        digits = _chosen(model, [folder.name for _, folder in models])
        places = [each for each in models if each[1].name == digits]
    else:
        places = [(folder, root / folder) for folder in FOLDERS if folder != MODELS] + (
            [(MODELS, root / MODELS)] if clear else models
        )
    total = 0
    for name, given in places:
        place = resolve_link(given)
        sizes = _sizes(place)
        size = sum(sizes.values())
        total += size
        print(f"{name}: {len(sizes)} files, {size / 1e6:.1f} MB in {place}")
        if clear:
            _remove(given, place)
    print(f"{'cleared' if clear else 'in all'}: {total / 1e6:.1f} MB")


def _forget(model: str | None) -> None:
    from yggdrasil.drafters.statistics.grown_table import forget_answers, models_with_answers

    size = forget_answers(None if model is None else _chosen(model, sorted(models_with_answers())))
    print(f"forgot the answers of {model or 'all models'}: {size / 1e6:.1f} MB")


def _by_model(place: Path) -> list[tuple[str, Path]]:
    """Return (name, folder) of each model in the cache; the name is from a plan, or else the fingerprint."""
    folders = sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []
    known = _names({folder.name for folder in folders})
    return sorted((known.get(folder.name, folder.name), folder) for folder in folders)


def _names(fingerprints: set[str]) -> dict[str, str]:
    """Return model names by fingerprint, from the plans that mention them."""
    from yggdrasil.artifacts import list_plans
    from yggdrasil.errors import ArtifactError
    from yggdrasil.scheduling.plan import Plan

    names: dict[str, str] = {}
    for entry in list_plans() if fingerprints else ():
        if not any(entry.mentions(each) for each in fingerprints - names.keys()):
            continue
        with suppress(ArtifactError):
            plan = Plan.load(entry.path)
            models = [plan.target, *([] if plan.drafter is None else [plan.drafter])]
            names |= {each.fingerprint: Path(each.source).name for each in models if each.fingerprint in fingerprints}
    return names


def _chosen(model: str, fingerprints: Sequence[str]) -> str:
    """Return the one of ``fingerprints`` that ``model`` names by a name in plans, a fingerprint, a path or a hub id.

    Raises:
        YggdrasilError: none or several of ``fingerprints`` match.
    """
    known = _names(set(fingerprints))
    found = [each for each in fingerprints if model in (each, known.get(each))]
    if not found:
        from yggdrasil.artifacts import model_fingerprint
        from yggdrasil.artifacts.homes import expanded
        from yggdrasil.checkpoints.hub import cached_hub_folder

        path = expanded(model)
        folder = path if path.exists() else cached_hub_folder(model)
        digits = None if folder is None else model_fingerprint(folder)
        found = [each for each in fingerprints if each == digits]
    if len(found) != 1:
        names = ", ".join(f"{known[each]} ({each})" if each in known else each for each in fingerprints)
        what = f"{len(found)} models of that name are kept" if found else f"nothing is kept of {model}"
        raise YggdrasilError(f"{what}; the cache has {names or 'no models'}")
    return found[0]


def _remove(given: Path, place: Path) -> None:
    if not place.exists():
        return
    try:
        shutil.rmtree(place)
        if given.is_symlink():
            place.mkdir()  # what the link points at
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise YggdrasilError(f"cannot clear {place} ({reason}); check its permissions") from error


def _sizes(place: Path) -> dict[Path, int]:
    """Return the bytes of every file below ``place``; files that vanish meanwhile are skipped."""
    sizes = {}
    for folder, _, names in os.walk(place):
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                sizes[path] = path.stat().st_size
    return sizes
