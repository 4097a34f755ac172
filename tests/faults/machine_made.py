"""Damage to what a machine keeps: kernels, tensors of models, and their own text."""

import json
from pathlib import Path
from random import Random

from mutate import WRONG_VALUES, damage, replace_file


def damage_library(library: Path, random: Random) -> tuple[Path, str]:
    path = random.choice((library, library, library.with_suffix(".sha256")))
    done = damage(path, random) if random.random() < 0.7 else replace_file(path, random)
    return path, f"{path.name}: {done}"


def damage_kept(models: Path, random: Random) -> tuple[Path, str]:
    """Damage a file of what was kept of a model, or have something else stand where its folder stood."""
    files = sorted(path for path in models.rglob("*") if path.is_file())
    path = random.choice([*files, *sorted({file.parent for file in files})])
    done = replace_file(path, random) if path.is_dir() or random.random() < 0.2 else damage(path, random)
    return path, f"{path.relative_to(models)}: {done}"


def damage_text(path: Path, random: Random) -> str:
    """Damage kept text, or one of its lines: whole JSON of tokens that cannot be."""
    kind = random.choice(("bytes", "bytes", "file", "line", "line", "line"))
    if kind != "line":
        return damage(path, random) if kind == "bytes" else replace_file(path, random)
    lines = path.read_text().splitlines()
    number = random.randrange(len(lines))
    record = json.loads(lines[number])
    tokens = record[random.choice(("prompt", "answer"))]
    tokens[random.randrange(len(tokens))] = value = random.choice((*WRONG_VALUES, 96, 2**31, 2**63, 2**70))
    lines[number] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")
    return f"a token is {value!r:.40}"
