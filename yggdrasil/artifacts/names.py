"""Locate profiles, predictors and plans by name, and find the plan of this machine."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yggdrasil.artifacts.atomic import shown
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.homes import expanded
from yggdrasil.artifacts.machine import Machine
from yggdrasil.artifacts.parsing import close_match, parse_dataclass
from yggdrasil.artifacts.plain import parse_yaml
from yggdrasil.errors import ArtifactError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_LONGEST_NAME = 128
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan on disk. Its file is read on demand, so listing many plans is fast."""

    name: str
    slug: str  # ``Machine.slug`` of the plan's machine
    path: Path

    @property
    def machine(self) -> Machine | None:
        """The machine on which the plan was calibrated, read from the plan's file; None if the file is damaged."""
        return _machine_of(self.path)

    def mentions(self, text: str) -> bool:
        """Return whether the plan's file contains ``text``, without parsing; False if it cannot be read."""
        try:
            return text.encode() in self.path.read_bytes()
        except OSError:
            return False

    def fits(self, machine: Machine) -> bool:
        """Return whether the plan was calibrated on a machine with the same fingerprint as ``machine``."""
        return self.slug == machine.slug or self.slug.endswith(f"-{machine.fingerprint}")

    def describe(self) -> str:
        """Return one line: the plan's name, machine and path."""
        machine = self.machine
        return f"{self.name} for {self.slug if machine is None else machine.describe()} [{shown(self.path)}]"


def validate_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a plan and its files.

    Raises:
        ArtifactError: ``name`` has characters other than letters, digits, dot, underscore and hyphen, starts with
            a dot, is empty, or has more than 128 characters.
    """
    if len(name) > _LONGEST_NAME:
        raise ArtifactError(f"'{name}' cannot name a plan; use at most {_LONGEST_NAME} characters.")
    if _NAME.fullmatch(name) is None:
        raise ArtifactError(
            f"'{name}' cannot name a plan; use letters, digits, '.', '_' and '-', and do not start with a dot."
        )
    return name


def search_roots() -> list[Path]:
    """Return the folders in which ``plans``, ``profiles`` and ``predictors`` are looked for, in order of precedence.

    The folders are the working directory and the source checkout, each if it has a ``plans`` folder, and ``artifacts``
    in ``cache_root``. New files are written to the first folder.
    """
    roots = [root for root in (Path.cwd(), _PACKAGE_ROOT) if (root / "plans").is_dir() and not _is_installed(root)]
    roots.append(cache_root() / "artifacts")
    return list(dict.fromkeys(roots))


def profile_directory(root: Path, name: str, machine: Machine) -> Path:
    """Return the path of a profile folder (measured times), ``root/profiles/NAME/MACHINE``; it need not exist.

    Raises:
        ArtifactError: the name has invalid characters.
    """
    return root / "profiles" / validate_name(name) / machine.slug


def predictor_directory(root: Path, name: str, machine: Machine) -> Path:
    """Return the path of a predictor folder (fitted tables and networks), ``root/predictors/NAME/MACHINE``.

    The folder may not exist.

    Raises:
        ArtifactError: the name has invalid characters.
    """
    return root / "predictors" / validate_name(name) / machine.slug


def plan_path(root: Path, name: str, machine: Machine) -> Path:
    """Return the path of a plan file, ``root/plans/NAME/MACHINE.yaml``; it need not exist.

    Raises:
        ArtifactError: the name has invalid characters.
    """
    return root / "plans" / validate_name(name) / f"{machine.slug}.yaml"


def root_of(plan: Path) -> Path:
    """Return ``root`` of the plan file ``root/plans/NAME/MACHINE.yaml``."""
    return plan.parent.parent.parent


def profile_of_plan(plan: Path, predictor: Path) -> Path:
    """Return the folder with the measured times (the profile) that a plan was made from.

    The folder is ``profiles/NAME/MACHINE`` with the plan's name, if this folder exists. Otherwise, as for a plan that a
    search has saved under a new name, NAME is taken from the path ``predictor``.

    Args:
        plan: the plan's file, ``plans/NAME/MACHINE.yaml``.
        predictor: the plan's predictor folder, ``predictors/NAME/MACHINE``.
    """
    profiles = root_of(plan) / "profiles"
    own = profiles / plan.parent.name / plan.stem
    return own if own.is_dir() else profiles / predictor.resolve().parent.name / plan.stem


def list_plans(name: str | None = None, roots: Sequence[Path] | None = None) -> list[PlanEntry]:
    """Return the plans on disk, sorted by root (in the order given), name and machine.

    Of plans with the same name and machine, only the one in the first root is returned. Files are not read, so damaged
    plans are listed too. Roots without read permission are skipped.

    Args:
        name: return only plans of this name; None: return all.
        roots: folders with a ``plans`` folder; None: the folders of ``search_roots``.

    Raises:
        ArtifactError: the name has invalid characters.
    """
    pattern = "*" if name is None else validate_name(name)
    entries: dict[tuple[str, str], PlanEntry] = {}
    for root in search_roots() if roots is None else roots:
        for path in _files(root / "plans", f"{pattern}/*.yaml"):
            key = (path.parent.name, path.stem)
            if key not in entries and not any(part.startswith(".") for part in key):
                entries[key] = PlanEntry(*key, path=path)
    return list(entries.values())


def _files(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except PermissionError:  # a root of another user; other roots are still searched
        return []


def resolve_plan(
    name_or_path: str | Path, machine: Machine, roots: Sequence[Path] | None = None, force: bool = False
) -> Path:
    """Return the absolute path of a plan for ``machine``.

    Args:
        name_or_path: an existing plan file, whatever its machine, or the name of a plan that was calibrated on
            ``machine``.
        roots: folders with a ``plans`` folder; None: the folders of ``search_roots``.
        force: if no plan of the name fits the machine and there is only one, return that plan.

    Raises:
        ArtifactError: there is no such plan; the message lists the existing plans and how to calibrate or force one.
    """
    path = expanded(name_or_path)
    if path.is_file():
        return path.parent.resolve() / path.name
    text = str(name_or_path)
    if path.name != text or path.suffix in (".yaml", ".yml"):
        raise ArtifactError(f"there is no plan file {text}; check the path, or give a plan's name.")
    entries = list_plans(text, roots)
    for entry in entries:
        if entry.fits(machine):
            return entry.path
    if force and len(entries) == 1:
        return entries[0].path
    raise ArtifactError(_nothing_fits(text, machine, entries, roots))


def _nothing_fits(name: str, machine: Machine, entries: Sequence[PlanEntry], roots: Sequence[Path] | None) -> str:
    calibrate = f"`yggdrasil calibrate MODEL --name {name}`"
    if entries:
        lines = "".join(f"\n  {entry.describe()}" for entry in entries)
        return (
            f"no plan named '{name}' fits this machine ({machine.describe()}); calibrate here with {calibrate}, or "
            f"give the path of one of these in its place, with `--force-machine`:{lines}"
        )
    others = sorted({entry.name for entry in list_plans(None, roots)})
    hint = close_match(name, others)
    there = f"; the plans are: {', '.join(others)}" if others else "; there are none yet"
    return f"there is no plan named '{name}'{hint}; make one with {calibrate}{there}."


def _machine_of(path: Path) -> Machine | None:
    """Return the ``machine`` of a plan file, or None if it is damaged, so that listing plans does not fail."""
    try:
        content = parse_yaml(path.read_bytes())
        return parse_dataclass(Machine, content["machine"], shown(path))
    except (OSError, ValueError, TypeError, KeyError, ArtifactError):
        return None


def _is_installed(root: Path) -> bool:
    """Return whether ``root`` is a folder of installed packages, in which ``plans`` would be another package."""
    return root.name in ("site-packages", "dist-packages")
