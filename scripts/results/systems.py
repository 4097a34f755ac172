"""Other systems on the same prompts, and equality with transformers' own ``generate``."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from results.records import Record, Result, number, table

WAYS = {  # way of drafting: its title
    "plan": "plan's policy",
    "EGT": "Equal-Growth Tree",
    "chain": "chain",
    "k-ary": "k-ary tree",
    "off": "plain",
}


def systems(results: Sequence[Result]) -> str:
    """A row for each target and system: prompts of all sets together, AAL and time as means."""
    rows = []
    for target, group in _by_target(results).items():
        names = dict.fromkeys(row["system"] for result in group for row in result.record["summary"])
        for name in names:
            own = {result.prompts: row for result in group for row in result.record["summary"] if row["system"] == name}
            aal = [row["aal"] for row in own.values() if row["aal"] is not None]
            ratios = {prompts: row["total_ratio_to_ours"] for prompts, row in own.items()}
            rows.append(
                [
                    target,
                    name,
                    same_as_plain(own.values()),
                    number(statistics.mean(aal) if aal else None),
                    number(statistics.mean(row["tpot_ms"]["median"] for row in own.values())),
                    f"**{statistics.mean(ratios.values()):.2f}**",
                    ", ".join(f"{prompts} {ratio:.2f}" for prompts, ratio in ratios.items()),
                ]
            )
    return table(["target", "system", "as its own plain", "AAL", "ms a token", "over ours", "set by set"], rows)


def same_as_plain(rows: Iterable[Record]) -> str:
    """How many prompts have the tokens of the system's own plain decoding, and why the rest have not."""
    listed = list(rows)
    if any(row["same_as_plain"] is None for row in listed):
        return "-"
    text = f"{sum(row['same_as_plain'] for row in listed)} of {sum(row['prompts'] for row in listed)}"
    partings = [parting for row in listed for parting in row.get("partings") or []]
    faults = sum(parting["verdict"] != "tie" for parting in partings)
    if faults:
        return f"{text}, faults in {faults}"
    return f"{text}, a tie in {len(partings)}" if partings else text


def equality(results: Sequence[Result]) -> str:
    """Prompts with equal tokens, by sampling setting and way of drafting; a dash for what was not asked."""
    rows = [
        [
            f"{result.target}, {result.record['prompts']} x {result.record['max_new_tokens']} tokens",
            setting,
            *(_count(matched, way, result.record["prompts"]) for way in WAYS),
        ]
        for result in results
        for setting, matched in result.record["matched"].items()
    ]
    return table(["target, prompts", "sampling", *WAYS.values()], rows)


def _count(matched: Mapping[str, int], way: str, prompts: int) -> str:
    return f"{matched[way]} of {prompts}" if way in matched else "-"


def _by_target(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        dtype = result.record["settings"]["dtype"]
        groups.setdefault(f"{result.target}, {dtype}", []).append(result)
    return groups
