"""Damage that keeps a file whole: checkpoints, tensors and tables whose checksum fits and whose content does not."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from mutate import change_json, damage, replace_file

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MODEL_FILES = (WEIGHTS, WEIGHTS, CONFIG, CONFIG, CONFIG, "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json")


def damage_checkpoint(folder: Path, names: Sequence[str], random: Random) -> tuple[Path, str]:
    """Damage one of the files of a checkpoint; returns the file and what was done."""
    path = folder / random.choice(names)
    if path.suffix == ".json" and random.random() < 0.6:
        done = change_json(path, random)
    elif path.name == WEIGHTS and random.random() < 0.4:
        done = _change_weights(path, random)
    else:
        done = damage(path, random) if random.random() < 0.8 else replace_file(path, random)
    return path, f"{path.name}: {done}"


def _change_weights(path: Path, random: Random) -> str:
    """A whole file that lacks a tensor, has one more, or one of another shape, type or content."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    kind = random.choice(("removed", "renamed", "misshapen", "flat", "another type", "not finite", "added"))
    if kind == "removed":
        del tensors[name]
    elif kind == "renamed":
        tensors[name + ".old"] = tensors.pop(name)
    elif kind == "misshapen":
        tensors[name] = tensors[name][:-1].contiguous()
    elif kind == "flat":
        tensors[name] = tensors[name].flatten()[None].contiguous()
    elif kind == "another type":
        tensors[name] = tensors[name].to(random.choice((torch.int8, torch.float16, torch.float64, torch.bool)))
    elif kind == "not finite":
        tensors[name].view(-1)[0] = random.choice((float("nan"), float("inf")))
    else:
        tensors["model.layers.7.extra.weight"] = torch.zeros(3)
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{name} {kind}"


def change_tensor(path: Path, random: Random) -> str:
    """A predictor, scorer or table with the checksum that fits and content that does not."""
    import numpy as np

    from yggdrasil.artifacts import read_tensors, write_tensors
    from yggdrasil.drafters.statistics import scorer, table
    from yggdrasil.predictor import bundle

    module: Any = {"predictor": bundle, "scorer": scorer, "table": table}[path.stem]
    arrays = read_tensors(path, module.KIND, module.SCHEMA_VERSION)
    name = random.choice(sorted(arrays))
    kind = random.choice(("removed", "nan", "inf", "negative", "huge", "shape", "type", "empty", "number", "shuffled"))
    array = arrays.pop(name)
    changes: dict[str, Any] = {
        "nan": lambda: np.full_like(array, np.nan, np.float32), "inf": lambda: np.full_like(array, np.inf, np.float32),
        "negative": lambda: -array, "huge": lambda: array * 10**9, "shape": lambda: array[..., None],
        "type": lambda: array.astype(np.int8), "empty": lambda: array[:0] if array.ndim else array,
        "number": lambda: np.float32(1.0), "shuffled": lambda: np.array(random.sample(list(array.flat), array.size)),
    }  # fmt: skip
    if kind != "removed":
        arrays[name] = changes[kind]()
    write_tensors(path, module.KIND, module.SCHEMA_VERSION, arrays)
    return f"{name}: {kind}"


def change_table(path: Path, random: Random) -> str:
    """A table with the checksum that fits and content that does not."""
    from yggdrasil.artifacts import read_csv, write_csv

    kind, version = ("stage-samples", 1) if path.name == "stage_samples.csv" else ("schedule-samples", 2)
    frame = read_csv(path, kind, version)
    column = random.choice(list(frame.columns))
    change = random.choice(("removed", "text", "negative", "missing", "huge", "no rows", "few rows"))
    if change == "removed":
        frame = frame.drop(columns=column)
    elif change in ("no rows", "few rows"):
        frame = frame.iloc[: 0 if change == "no rows" else random.randrange(1, 4)]
    else:
        frame = frame.astype({column: object})
        frame.loc[random.randrange(len(frame)), column] = {
            "text": "x",
            "negative": -1,
            "missing": None,
            "huge": 10**30,
        }[change]
    write_csv(path, kind, version, frame)
    return f"{column} {change}"
