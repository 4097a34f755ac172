"""Result files: where they lie, in which order they are shown, and how their figures are written."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yggdrasil.bench.spread import describe

Record = dict[str, Any]
TARGETS = {  # folder below profiles, plans and predictors: what it holds; others are of who works here
    "smollm2": "SmolLM2-135M",
    "smollm2-bf16": "SmolLM2-135M in bf16",
    "smollm2-q4_0": "SmolLM2-135M in Q4_0",
    "smollm2-q4_k_m": "SmolLM2-135M in Q4_K_M",
    "smollm2-q8_0": "SmolLM2-135M in Q8_0",
    "smollm2-342M": "widened to 342M",
    "smollm2-1B": "widened to 1.04B",
    "smollm2-1B-q8_0": "widened to 1.04B in Q8_0",
    "smollm2-1B-q4_0": "widened to 1.04B in Q4_0",
    "tiny": "bundled pair, 11M",
}
SETS = {
    "specbench": "Spec-Bench, chat",
    "c4": "C4",
    "cnndm": "CNN/DailyMail",
    "wikipedia": "Wikipedia",
    "humaneval": "HumanEval",
}


@dataclass(frozen=True)
class Result:
    """One result file: whose it is and what it says."""

    folder: str
    machine: str
    set_name: str  # "c4" of bench-c4.json, empty for turns.json
    record: Record

    @property
    def target(self) -> str:
        return TARGETS[self.folder]

    @property
    def processor(self) -> str:
        """Of the machine that the record names."""
        return str(self.record["machine"]).partition(",")[0].replace("(R)", "").replace(" Processor", "")

    @property
    def prompts(self) -> str:
        return SETS.get(self.set_name, self.set_name)


def read_results(profiles: Path, kind: str) -> dict[str, list[Result]]:
    """The results of ``kind`` by machine: ``profiles/NAME/MACHINE/KIND.json`` and ``KIND-SET.json``, in shown order.

    Raises:
        ValueError: a file is not a JSON object.
    """
    found: dict[str, list[Result]] = {}
    for path in sorted(profiles.glob(f"*/*/{kind}*.json")):
        set_name = path.stem.removeprefix(kind)
        if path.parent.parent.name not in TARGETS:
            continue
        if set_name and not set_name.startswith("-"):
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error.msg})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path} holds no object")
        result = Result(path.parent.parent.name, path.parent.name, set_name.removeprefix("-").replace("_", ""), record)
        found.setdefault(result.machine, []).append(result)
    return {machine: sorted(results, key=_place) for machine, results in found.items()}


def caption(results: Sequence[Result]) -> str:
    """Where and with what these were measured, each file by one run."""
    records = [result.record for result in results]
    machines = _distinct(str(record["machine"]) for record in records)
    commits = _distinct(str(record.get("commit"))[:10] for record in records)
    versions = _distinct(_versions(record.get("versions") or {}) for record in records)
    kinds = _distinct(_effort(record) for record in records)
    parts = [*machines, *versions, f"commit {', '.join(commits)}", *kinds, "one run each"]
    return f"_{'; '.join(part for part in parts if part)}._"


def percent(share: float | None) -> str:
    """A share as whole per cent; a dash where it was not measured."""
    return "-" if share is None else f"{share:.0%}"


def number(value: float | None, digits: int = 2) -> str:
    """A number; a dash where it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def spread_text(spread: Mapping[str, Any]) -> str:
    """The median, and the quartiles or, of fewer than four samples, all of them."""
    median, *rest = describe(spread).split(" ", maxsplit=1)
    return " ".join([f"**{median}**", *rest])


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def set_place(result: Result) -> tuple[int, str]:
    """Where the prompts of a result come among those that are shown."""
    sets = list(SETS)
    return sets.index(result.set_name) if result.set_name in sets else len(sets), result.set_name


def _place(result: Result) -> tuple[int, str, int, str]:
    folders = list(TARGETS)
    place = folders.index(result.folder) if result.folder in folders else len(folders)
    return (place, result.folder, *set_place(result))


def _versions(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name))


def _effort(record: Record) -> str:
    """Arithmetic and length of the answers, where the file says them."""
    settings = {**record, **record.get("settings", {})}
    tokens = settings.get("max_new_tokens")
    return ", ".join([*([str(settings["dtype"])] if settings.get("dtype") else []),
                      *([f"{tokens} tokens a prompt"] if tokens else [])])  # fmt: skip


def _distinct(texts: Iterable[str]) -> list[str]:
    return [re.sub(r"\s+", " ", text) for text in dict.fromkeys(texts) if text]
