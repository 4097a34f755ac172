"""The rows of ``docs/results/``: one CSV file a benchmark, a row a prompt or a measured pass, and who measured them.

``collect`` makes them of the JSON files that the benchmarks write; they hold every sample and are not committed.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, str]
Record = Mapping[str, Any]
KEY = ("target", "machine", "set")  # what a file of a benchmark is of, in every row that comes from it
COLUMNS = {
    "runs": ("benchmark", *KEY, "processor", "torch", "transformers", "commit", "dtype", "tokens"),
    "plain": (*KEY, "drafters", "prompt", "category", "same", "repeats", "aal", "tokens", "plain_ms", "ours_ms"),
    "systems": (*KEY, "system", "prompt", "same", "aal", "tokens", "ms"),
    "passes": (*KEY, "file", "context", "width", "ours_ms", "theirs_ms", "least_ms"),
    "waiting": (*KEY, "case", "first_token_s", "whole_s", "peak_mb"),
    "turns": (*KEY, "history_tokens", "prompt_tokens", "reused_tokens", "first_turn_ms", "second_turn_ms", "short_ms"),
    "equality": (*KEY, "sampling", "drafting", "prompts", "same"),
}


def read_rows(folder: Path, benchmark: str) -> list[Row]:
    """The rows of a benchmark; none where it was never measured.

    Raises:
        ValueError: the file has other columns.
    """
    file = folder / f"{benchmark}.csv"
    if not file.is_file():
        return []
    reader = csv.DictReader(io.StringIO(file.read_text(encoding="utf-8")))
    if tuple(reader.fieldnames or ()) != COLUMNS[benchmark]:
        raise ValueError(f"{file} has the columns {reader.fieldnames}, not {list(COLUMNS[benchmark])}")
    return list(reader)


def write_rows(folder: Path, benchmark: str, rows: Iterable[Row]) -> None:
    """Write the rows of a benchmark, sorted by target, machine and set."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{benchmark}.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS[benchmark], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: [row[name] for name in KEY]))


def collect(records: Iterable[Path], folder: Path) -> None:
    """Put what ``records`` say into ``folder``; rows of the same benchmark, target, machine and set are replaced.

    A record lies at TARGET/MACHINE/KIND.json or KIND-SET.json, as ``scripts/measure_results`` writes it.

    Raises:
        ValueError: a file is not the JSON of a benchmark.
    """
    kept = {benchmark: read_rows(folder, benchmark) for benchmark in COLUMNS}
    for path in records:
        kind, _, name = ("first-contact", "", "") if path.stem == "first-contact" else path.stem.partition("-")
        if kind not in _READERS:
            continue
        benchmark, rows_of = _READERS[kind]
        key = {"target": path.parent.parent.name, "machine": path.parent.name, "set": name.replace("_", "")}
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            new = [{**key, **row} for row in rows_of(record)]
            run = {"benchmark": benchmark, **key, **_run(record)}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not the JSON of a benchmark ({error})") from error
        kept[benchmark] = [row for row in kept[benchmark] if not _is_of(row, key)] + new
        others = [row for row in kept["runs"] if row["benchmark"] != benchmark or not _is_of(row, key)]
        kept["runs"] = [*others, run]
    for benchmark, rows in kept.items():
        write_rows(folder, benchmark, rows)


def _is_of(row: Row, key: Row) -> bool:
    return all(row[name] == key[name] for name in KEY)


def _run(record: Record) -> Row:
    settings = {**record, **record.get("settings", {})}
    versions = record.get("versions") or {}
    return {
        "processor": str(record["machine"]),
        **{name: str(versions.get(name) or "") for name in ("torch", "transformers")},
        "commit": str(record.get("commit"))[:10],
        "dtype": str(settings.get("dtype") or ""),
        "tokens": str(settings.get("max_new_tokens") or ""),
    }


def _plain(record: Record) -> list[Row]:
    """Of ``bench``: every prompt by the plan, and by the plans beside it."""
    rows = []
    for sample in record["samples"]:
        others = {record["beside"][name]["guesses"]: found for name, found in (sample.get("beside") or {}).items()}
        for drafters, found in {str(record.get("guesses") or ""): sample, **others}.items():
            rows.append(
                {
                    "drafters": drafters,
                    "prompt": str(sample["id"]),
                    "category": str(sample.get("category") or ""),
                    "same": str(int(found["matched"])),
                    "repeats": _number(sample["repeats"], 3),
                    "aal": _number(found["tree"]["aal"], 3),
                    "tokens": str(sample["plain"]["iterations"]),
                    "plain_ms": _number(sample["plain"]["tpot_ms"], 4),
                    "ours_ms": _number(found["tree"]["tpot_ms"], 4),
                }
            )
    return rows


def _systems(record: Record) -> list[Row]:
    """Of ``compare_systems``: every prompt by every system, and whether its tokens are its own plain decoding's."""
    plain = {
        (sample["prompt"], _family(sample["system"])): sample["continuation"]["tokens"]
        for sample in record["samples"]
        if sample["system"].endswith(("plain", "plain compiled", "dynamic cache"))
    }
    rows = []
    for sample in record["samples"]:
        found, own = sample["continuation"], plain.get((sample["prompt"], _family(sample["system"])))
        rows.append(
            {
                "system": sample["system"],
                "prompt": str(sample["prompt"]),
                "same": "" if own is None else str(int(found["tokens"] == own)),
                "aal": _number(found["decoded"] / found["passes"], 3) if found.get("passes") else "",
                "tokens": str(found["decoded"]),
                "ms": _number(found["tpot_ms"], 4),
            }
        )
    return rows


def _family(system: str) -> str:
    return system.rpartition(",")[0]


def _passes(record: Record) -> list[Row]:
    return [
        {
            "file": str(file["format"]),
            "context": str(one["context"]),
            "width": str(one["width"]),
            "ours_ms": _number(one["ours_ms"]["median"], 4),
            "theirs_ms": _number(one["theirs_ms"]["median"], 4),
            "least_ms": _number(one["least_ms"], 4),
        }
        for file in record["files"]
        for one in file["passes"]
    ]


def _waiting(record: Record) -> list[Row]:
    names = ("first_token_s", "whole_s", "peak_mb")
    return [{"case": case["name"], **{name: _number(case[name], 2) for name in names}} for case in record["cases"]]


def _turns(record: Record) -> list[Row]:
    short, names = _number(record["short_prompt_ms"], 2), COLUMNS["turns"][len(KEY) : -1]
    return [{**{name: _number(case[name], 2) for name in names}, "short_ms": short} for case in record["cases"]]


def _equality(record: Record) -> list[Row]:
    return [
        {"sampling": sampling, "drafting": way, "prompts": str(record["prompts"]), "same": str(count)}
        for sampling, ways in record["matched"].items()
        for way, count in ways.items()
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else str(value)


_READERS = {  # beginning of a JSON file's name: the benchmark, and what makes rows of it
    "bench": ("plain", _plain),
    "systems": ("systems", _systems),
    "steps": ("passes", _passes),
    "first-contact": ("waiting", _waiting),
    "turns": ("turns", _turns),
    "equality": ("equality", _equality),
}
