#!/usr/bin/env python3
"""Write the README's tables of results from the committed JSON files they stand for.

    scripts/readme_tables.py           # rewrite README.md
    scripts/readme_tables.py --check   # exit code 1 if a table differs

A table stands between ``<!-- table: KIND MACHINE -->`` and ``<!-- end of table -->``. Its rows come from
``profiles/*/MACHINE/KIND-*.json``: bench from `yggdrasil bench`, trees from `yggdrasil bench --tree NAME`, rules from
`yggdrasil bench rules`, exactness from `yggdrasil bench exactness`, constraints from `scripts/check_constraints.py`,
equality from `scripts/check_equality.py`, objectives from `scripts/compare_objectives.py`, systems from
`scripts/compare_systems`, each with ``--json``; search from the ``schedule_ranking.csv`` of `yggdrasil search`,
breakdown and temperatures from the ``figure-12.csv`` and ``figure-15.csv`` of `yggdrasil bench figures`.
"""

import argparse
import csv
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "profiles"
MARKED = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SETS = ("c4", "wikipedia", "cnndm", "humaneval")  # the paper's three, then ours; others follow by name
Record = dict[str, Any]


def render(text: str, results: Path) -> str:
    """``text`` with every marked table made anew; ValueError where a table has no results or an unknown kind."""

    def table(match: re.Match[str]) -> str:
        kind, machine = match[2], match[3]
        if kind not in TABLES:
            raise ValueError(f"there is no table {kind!r}; choose from {', '.join(TABLES)}")
        name = CSV_OF.get(kind, f"{kind}-*.json")
        files = sorted(results.glob(f"*/{machine}/{name}"))
        if not files:
            raise ValueError(f"no results {name} for {machine} in {results}")
        return f"{match[1]}\n{TABLES[kind](sorted(map(_read, files), key=_place))}\n{match[4]}"

    return MARKED.sub(table, text)


def bench_table(records: Iterable[Record]) -> str:
    """Yggdrasil against plain compiled decoding."""
    rows = []
    for record in records:
        speedup, predicted = record["speedup"], record["predicted_speedup"]
        rows.append(
            [
                _target(record["plan"]),
                record["set"],
                f"{record['matched']} of {record['prompts']}",
                f"{record['aal']:.2f}",
                f"{record['baseline_tpot_ms']:.2f}",
                f"{record['tpot_ms']:.2f}",
                f"**{speedup['median']:.2f}** ({speedup['low']:.2f} to {speedup['high']:.2f})",
                "-" if predicted is None else f"{predicted:.2f}",
                f"{record['overhead_share']:.1%}",
            ]
        )
    titles = "target|prompts|same tokens|AAL|plain ms/token|ours|speed-up|predicted|overhead"
    return _table(titles.split("|"), rows)


def systems_table(records: Iterable[Record]) -> str:
    """Rival systems, a row for all sets: prompts together, AAL and TPOT as means, the ratio to ours set by set."""
    by_target: dict[str, list[Record]] = {}
    for record in records:
        settings = record["settings"]
        by_target.setdefault(f"{_target(settings['plan'])}, {settings['dtype']}", []).append(record)
    rows = []
    for target, group in by_target.items():
        sets = ", ".join(record["set"] for record in group)
        by_system = [{row["system"]: row for row in record["summary"]} for record in group]
        for system in by_system[0]:
            own = [found[system] for found in by_system]
            aal = [row["aal"] for row in own if row["aal"] is not None]
            ratios = [row["ratio_to_ours"]["median"] for row in own]
            rows.append(
                [
                    f"{target}: {sets}",
                    system,
                    _equality(_together(own)),
                    f"{statistics.mean(aal):.2f}" if aal else "-",
                    f"{statistics.mean(row['tpot_ms']['median'] for row in own):.2f}",
                    f"**{statistics.mean(ratios):.2f}** ({', '.join(f'{ratio:.2f}' for ratio in ratios)})",
                ]
            )
    return _table(["target: prompts", "system", "as its own plain", "AAL", "ms/token", "over ours"], rows)


def _together(rows: list[Record]) -> Record:
    """Prompts, equal ones and partings of all sets."""
    same = [row["same_as_plain"] for row in rows]
    return {
        "prompts": sum(row["prompts"] for row in rows),
        "same_as_plain": None if None in same else sum(same),
        "partings": [parting for row in rows for parting in row.get("partings") or []],
    }


def trees_table(records: Iterable[Record]) -> str:
    """AAL of each tree at each verify budget, mean over the sets, and its time a token at its fastest, over ours.

    What chooses its own width at every step (the plan, parts of it, plain decoding) has a column of its own.
    """
    by_target: dict[str, list[Record]] = {}
    for record in records:
        by_target.setdefault(_target(record["settings"]["plan"]), []).append(record)
    found = {target: [_by_tree(record) for record in group] for target, group in by_target.items()}
    budgets = sorted(
        {budget for sets in found.values() for trees in sets for rows in trees.values() for budget in rows}
    )
    lines = []
    for target, sets in found.items():
        title = f"{target}, {', '.join(record['set'] for record in by_target[target])}"
        means = {tree: _means([trees[tree] for trees in sets], budgets) for tree in sets[0]}
        best = [max((values[i] or 0.0 for values in means.values()), default=None) for i in range(len(budgets))]
        is_timed = all(record["settings"].get("backend") != "eager" for record in by_target[target])
        for tree, values in means.items():
            cells = [_marked(value, top) for value, top in zip(values, best, strict=True)]
            fastest = [min(row["ratio_to_ours"]["median"] for row in trees[tree].values()) for trees in sets]
            lines.append([title, tree, *cells, "-", f"{sum(fastest) / len(fastest):.2f}" if is_timed else "-"])
        chosen = [_by_choice(record) for record in by_target[target]]
        for name in chosen[0]:
            aal, ratio = (sum(rows[name][i] for rows in chosen) / len(chosen) for i in range(2))
            cells = ["-"] * len(budgets)
            lines.append([title, name, *cells, f"{aal:.2f}", f"{ratio:.2f}" if is_timed else "-"])
    titles = ["target, prompts", "tree", *(f"AAL, {budget}" for budget in budgets), "AAL, any width", "over ours"]
    return _table(titles, lines)


def _by_choice(record: Record) -> dict[str, tuple[float, float]]:
    """AAL and time a token over ours of each system that is no tree of one budget."""
    return {
        row["system"].removeprefix("yggdrasil, "): (row["aal"], row["ratio_to_ours"]["median"])
        for row in record["summary"]
        if not row["system"].rpartition(" ")[2].isdecimal()
    }


def _by_tree(record: Record) -> dict[str, dict[int, Record]]:
    """Rows of each tree by verify budget; plan and plain decoding are no trees."""
    found: dict[str, dict[int, Record]] = {}
    for row in record["summary"]:
        name, _, budget = row["system"].rpartition(" ")
        if budget.isdecimal():
            found.setdefault(name, {})[int(budget)] = row
    return found


def _means(sets: list[dict[int, Record]], budgets: list[int]) -> list[float | None]:
    """Mean AAL over the sets at each budget; None where a set lacks it."""
    return [
        sum(rows[budget]["aal"] for rows in sets) / len(sets) if all(budget in rows for rows in sets) else None
        for budget in budgets
    ]


def _marked(value: float | None, best: float | None) -> str:
    if value is None or best is None:
        return "-"
    return f"**{value:.2f}**" if f"{value:.2f}" == f"{best:.2f}" else f"{value:.2f}"


RULES = {  # lossless, candidates, when to use it
    "match, by plan": ("yes, and equal to plain decoding under a seed", "what pays, by the plan", "the default"),
    "match": ("the same", "any fixed tree", "a tree of your own"),
    "match, k-ary": ("the same", "the drafter's best, by `expansion` (here 2,1,1)", "comparisons"),
    "leviathan": ("yes, in law", "a chain drawn from the drafter", "high temperature, a drafter close to the target"),
    "specinfer": ("yes, in law", "a tree drawn with replacement", "comparisons"),
    "sequoia": (
        "yes, in law",
        "a tree drawn without replacement",
        "high temperature, a drafter close to the target",
    ),
    "typical": ("**no** (Medusa)", "any fixed tree", "when any likely token will do"),
    "relaxed": ("**no** (TensorRT-LLM)", "any fixed tree", "thinking phases, with `thinking_only`"),
    "off": ("yes", "none", "the baseline"),
}


def rules_table(records: Iterable[Record]) -> str:
    """Every acceptance rule: what it promises, what it gives at each temperature."""
    rows = []
    for record in records:
        found = {(_rule(row), row["temperature"]): row for row in record["summary"]}
        temperatures = sorted({temperature for _, temperature in found})
        for name, described in RULES.items():
            at = [found[name, temperature] for temperature in temperatures]
            figures = [
                [f"{row['aal']:.2f}" for row in at],
                [f"{row['tpot_ms']['median']:.2f}" for row in at],
                [f"{row['ratio_to_ours']['median']:.2f}" for row in at],
            ]
            rows.append([f"`{name}`", *described, *(" / ".join(column) for column in figures)])
        degrees = " / ".join(f"T={temperature:g}" for temperature in temperatures)
    titles = ["rule", "lossless", "candidates", "when to use it", f"AAL, {degrees}", "ms a token", "of plain's time"]
    return _table(titles, rows)


MODES = {  # mode: what it does
    "off": "plain decoding, one row a pass",
    "fast": "nothing; `audit` counts what `strict` would decide otherwise",
    "strict": "where the winner leads by less than the tolerance, a width-1 pass decides",
    "off, fixed-width": "plain decoding in passes `fixed_width` wide",
    "fixed-width": "every pass, plain ones too, is `fixed_width` wide",
}


def exactness_table(records: Iterable[Record]) -> str:
    """Every exactness mode: equal tokens, and speed beside fast's."""
    rows = [
        [
            _target(record["settings"]["plan"]),
            f"`{row['system']}`",
            MODES[row["system"]],
            f"{row['same_as_plain']} of {row['prompts']}",
            f"{row['tpot_ms']['median']:.2f}",
            f"{1 / row['ratio_to_ours']['median']:.2f}",
        ]
        for record in records
        for row in record["summary"]
    ]
    return _table(["target", "`exactness`", "what it does", "as its plain", "ms a token", "of `fast`'s speed"], rows)


def constraints_table(records: Iterable[Record]) -> str:
    """Texts under JSON schemas: valid, equal to constrained plain decoding, and how fast."""
    rows = []
    for record in records:
        summary, speedup = record["summary"], record["summary"]["speedup"]
        rows.append(
            [
                _target(record["plan"]),
                f"{summary['valid']} of {summary['prompts']}",
                f"{summary['same']} of {summary['prompts']}",
                f"{summary['tokens']:.0f}",
                f"{summary['aal']:.2f}",
                f"{summary['plain_tpot_ms']:.2f}",
                f"{summary['tpot_ms']:.2f}",
                f"**{speedup['median']:.2f}** ({speedup['low']:.2f} to {speedup['high']:.2f})",
            ]
        )
    titles = "target|valid|same tokens|tokens a text|AAL|constrained plain ms/token|ours|speed-up"
    return _table(titles.split("|"), rows)


WAYS = {  # way of drafting: its title
    "plan": "plan's policy",
    "EGT": "Equal-Growth Tree",
    "chain": "chain",
    "k-ary": "k-ary tree",
    "off": "plain",
}


def equality_table(records: Iterable[Record]) -> str:
    """Prompts with equal tokens in float32, by sampling setting and way of drafting."""
    rows = [
        [
            f"{_target(record['plan'])}, {record['prompts']} x {record['max_new_tokens']} tokens",
            setting,
            *(f"{matched[way]} of {record['prompts']}" for way in WAYS),
        ]
        for record in records
        for setting, matched in record["matched"].items()
    ]
    return _table(["target, prompts", "sampling", *WAYS.values()], rows)


def objectives_table(records: Iterable[Record]) -> str:
    """Latency against accepted length as what the policy maximises (the paper's figure 14)."""
    rows = [
        [
            _target(record["plan"]),
            name,
            f"{found['matched']} of {found['prompts']}",
            " / ".join(f"{found['aal'][objective]:.2f}" for objective in ("latency", "aal")),
            f"**{found['latency_over_aal']['median']:.2f}** "
            f"({found['latency_over_aal']['low']:.2f} to {found['latency_over_aal']['high']:.2f})",
            f"{found['latency_over_plain']:.2f}",
        ]
        for record in records
        for name, found in record["summary"].items()
    ]
    titles = "target|prompts|same tokens|AAL: latency / aal|speed: latency over aal|latency over plain"
    return _table(titles.split("|"), rows)


NAMED_PLANS = ("naive", "AoT tail", "AoT head", "AoT tail and head")


def search_table(records: Iterable[Record]) -> str:
    """How far predicted iterations were off, and what the chosen plan gains over the first ranked and the named."""
    rows = []
    for record in records:
        entries = {entry["name"]: entry for entry in record["entries"] if entry["name"] != "plain decoding"}
        if not all(entry["measured_iteration_ms"] for entry in entries.values()):
            continue  # ranked, not measured
        errors = [
            abs(float(entry["predicted_iteration_ms"]) / float(entry["measured_iteration_ms"]) - 1)
            for entry in entries.values()
        ]
        ms = {name: float(entry["measured_ms_per_token"]) for name, entry in entries.items()}
        chosen = next(ms[name] for name, entry in entries.items() if entry["chosen"] == "True")
        gains = [f"{ms[name] / chosen:.2f}" for name in NAMED_PLANS]
        off = f"{statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
        rows.append([_target(record["plan"]), off, f"{ms['top 1'] / chosen - 1:.1%}", *gains])
    titles = "target|predicted iteration off by|chosen over ranked first|over naive|tail ahead|head ahead|both"
    return _table(titles.split("|"), rows)


def _rule(row: Record) -> str:
    name: str = row["system"].removesuffix(f", T={row['temperature']:g}")
    return name


def breakdown_table(records: Iterable[Record]) -> str:
    """What each part of the method adds to the one before, beside the paper's gains."""
    rows = []
    for record in records:
        for entry in record["entries"]:
            gains = [f"{float(entry[key]):.2f}" if entry[key] else "-" for key in ("gain", "gain_in_paper")]
            figures = [f"{float(entry['tpot_ms']):.2f}", f"{float(entry['aal']):.2f}"]
            rows.append([_target(record["plan"]), entry["system"], *figures, *gains])
    return _table(["target", "up to", "ms/token", "AAL", "gain", "in the paper"], rows)


def temperatures_table(records: Iterable[Record]) -> str:
    """Ours and the static tree at each temperature, over plain decoding."""
    rows = []
    for record in records:
        entries = record["entries"]
        for ours in (entry for entry in entries if entry["over_static"]):
            static = next(e for e in entries if e["temperature"] == ours["temperature"] and not e["over_static"])
            same = int(ours["same_as_ours"]), int(static["same_as_ours"]), int(static["prompts"])
            cells = [f"{float(entry[key]):.2f}" for key in ("aal", "speedup") for entry in (ours, static)]
            ratio = f"**{float(ours['over_static']):.2f}**"
            title = [_target(record["plan"]), f"{float(ours['temperature']):g}", f"{min(same)} of {same[2]}"]
            rows.append([*title, f"{cells[0]} / {cells[1]}", f"{cells[2]} / {cells[3]}", ratio])
        mean = float(entries[0]["mean_over_static"])
        rows.append([_target(record["plan"]), "mean", "", "", "", f"**{mean:.2f}**"])
    titles = "target|temperature|same tokens|AAL: ours / static|over plain: ours / static|ours over static"
    return _table(titles.split("|"), rows)


CSV_OF = {"search": "schedule_ranking.csv", "breakdown": "figure-12.csv", "temperatures": "figure-15.csv"}
TABLES: dict[str, Callable[[Iterable[Record]], str]] = {
    "bench": bench_table,
    "breakdown": breakdown_table,
    "constraints": constraints_table,
    "equality": equality_table,
    "exactness": exactness_table,
    "objectives": objectives_table,
    "rules": rules_table,
    "search": search_table,
    "systems": systems_table,
    "temperatures": temperatures_table,
    "trees": trees_table,
}


def _equality(row: Record) -> str:
    """As ``yggdrasil.bench.systems.equality`` says it; that one would import torch."""
    if row["same_as_plain"] is None:
        return "-"
    text, partings = f"{row['same_as_plain']} of {row['prompts']}", row.get("partings") or []
    faults = sum(parting["verdict"] != "tie" for parting in partings)
    if faults:
        return f"{text}, faults in {faults}"
    return f"{text}, a tie in {len(partings)}" if partings else text


def _read(path: Path) -> Record:
    if path.suffix == ".csv":
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        record: Record = {"plan": path.parent.parent.name, "entries": list(csv.DictReader(lines))}
    else:
        record = json.loads(path.read_text())
    return {**record, "set": path.stem.partition("-")[2], "folder": path.parent.parent.name}


def _place(record: Record) -> tuple[int, str, int, str]:
    """The largest target first, then the sets in their order."""
    size = re.search(r"(\d+)([MB])$", record["folder"])
    millions = int(size[1]) * (1000 if size[2] == "B" else 1) if size else 0
    name = record["set"]
    return -millions, record["folder"], SETS.index(name) if name in SETS else len(SETS), name


def _target(plan: str) -> str:
    if plan == "tiny":
        return "as shipped (11M)"
    return plan.replace("wide-", "widened to ", 1) if plan.startswith("wide-") else plan


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines) + "\n"


def main() -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a table differs")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    try:
        wanted = render(text, RESULTS)
    except ValueError as error:
        print(f"readme_tables: {error}", file=sys.stderr)
        return 2
    if options.check and wanted != text:
        print("README.md differs from the results; run scripts/readme_tables.py", file=sys.stderr)
        return 1
    if not options.check:
        README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
