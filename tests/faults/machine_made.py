"""Damage to what is compiled on a machine: packages with their manifests, and the library of kernels."""

import json
from pathlib import Path
from random import Random

from mutate import change_value, damage, replace_file


def damage_package(folder: Path, random: Random) -> tuple[Path, str]:
    """Damage a package or a manifest, exchange two, or leave half of a pair; returns the file and what was done."""
    packages = sorted(folder.glob("*.pt2"))
    package = random.choice(packages)
    manifest = package.with_suffix(".json")
    kind = random.choice(("bytes", "bytes", "bytes", "file", "exchanged", "manifest", "value", "value", "stray"))
    if kind == "exchanged":
        other = random.choice([path for path in packages if path != package])
        ours, theirs = package.read_bytes(), other.read_bytes()
        package.write_bytes(theirs)
        other.write_bytes(ours)
        return package, f"{package.name}: exchanged with {other.name}"
    if kind == "value":
        content, done = change_value(json.loads(manifest.read_text()), random)
        manifest.write_text(json.dumps(content))
        return manifest, f"{manifest.name}: {done}"
    if kind == "stray":  # what a killed process leaves
        (folder / f".{package.name}.0.tmp").write_bytes(b"half")
        (folder / "tmpabc").mkdir()
        package.unlink()
        return package, f"{package.name}: gone, strays beside it"
    path = manifest if kind == "manifest" else package
    done = replace_file(path, random) if kind == "file" else damage(path, random)
    return path, f"{path.name}: {done}"


def damage_library(library: Path, random: Random) -> tuple[Path, str]:
    path = random.choice((library, library, library.with_suffix(".sha256")))
    done = damage(path, random) if random.random() < 0.7 else replace_file(path, random)
    return path, f"{path.name}: {done}"
