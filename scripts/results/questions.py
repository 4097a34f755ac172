"""The tables of the documents: each answers one question from the rows of ``docs/results/``."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from results.rows import Row, read_rows

TARGETS = {  # in shown order, by the names of files; others are of who works here
    "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M-Instruct, Q4_1",
    "gemma-3-270m-q4_k_m": "Gemma 3 270M, Q4_K_M",
    "qwen2.5-coder-0.5b-instruct-q4_k_m": "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
    "qwen2.5-coder-1.5b-instruct-q4_k_m": "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
    "smollm2": "SmolLM2-135M, Q4_1 file",
    "smollm2-q4_0": "SmolLM2-135M, Q4_0 file",
    "smollm2-q4_k_m": "SmolLM2-135M, Q4_K_M file",
    "smollm2-q8_0": "SmolLM2-135M, Q8_0 file",
    "smollm2-bf16": "SmolLM2-135M, bf16",
    "smollm2-342M": "widened to 342M, bf16",
    "smollm2-1B": "widened to 1.04B, bf16",
    "smollm2-1B-q8_0": "widened to 1.04B, Q8_0",
}
SETS = {
    "specbench": "Spec-Bench, chat",
    "c4": "C4",
    "cnndm": "CNN/DailyMail",
    "wikipedia": "Wikipedia",
    "humaneval": "HumanEval",
}
PROCESSORS = {  # in shown order, by what /proc/cpuinfo says; others are called as it calls them
    "AMD EPYC (family 26.2)": "EPYC Zen 5",
    "AMD EPYC (family 25.17)": "EPYC Zen 4",
    "AMD EPYC (family 25.1)": "EPYC Zen 3",
    "Intel Xeon (family 6.167)": "Xeon with AMX",
    "Intel Xeon @ 2.00GHz (family 6.85)": "Xeon Skylake",
}
OURS, PLAIN = "yggdrasil, by plan", "yggdrasil, plain compiled"
HEADLINE_MACHINE = "amd-epyc-2c-441860c1"  # whose rows the README shows
NOTHING = "_Not measured yet; `scripts/measure_results` makes it._"


class Results:
    """The rows of the folder ``docs/results/``, and how machines and targets are called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processors = {row["machine"]: processor_name(row["processor"]) for row in self.rows("runs")}

    def rows(self, benchmark: str) -> list[Row]:
        """The rows of a benchmark that are of a shown target, in shown order."""
        found = [row for row in read_rows(self._folder, benchmark) if row["target"] in TARGETS]
        names, sets = list(TARGETS), list(SETS)
        return sorted(found, key=lambda row: (
            row["machine"], names.index(row["target"]), sets.index(row["set"]) if row["set"] in sets else len(sets)
        ))  # fmt: skip

    def processor(self, row: Row) -> str:
        """The processor on which the row was measured."""
        return self._processors.get(row["machine"], row["machine"])


def headline(results: Results) -> str:
    """README: every target on one processor."""
    shown = [row for row in _first_drafters(results.rows("plain")) if row["machine"] == HEADLINE_MACHINE]
    sets = _sets(shown)
    made = [
        [TARGETS[target], *(_speed_up([row for row in own if row["set"] == name]) for name in sets)]
        for (target,), own in _by(shown, "target")
    ]
    return table(["target", *(SETS[name] for name in sets)], made)


def faster_than_plain(results: Results) -> str:
    """Total time of plain decoding over ours, and the share of tokens that repeat the text."""
    return _by_processor(results, _first_drafters(results.rows("plain")), _speed_up)


def faster_than_llama_cpp(results: Results) -> str:
    """Time of llama.cpp over ours: its plain decoding, and the best of its n-gram settings in every set."""
    return _by_processor(results, results.rows("systems"), _against_llama_cpp)


def faster_than_python_engines(results: Results) -> str:
    """Time of OpenVINO GenAI, plain and by prompt look-up, and of ik_llama.cpp over ours; "-": the file is not read."""
    systems = ["OpenVINO GenAI, plain", "OpenVINO GenAI, prompt look-up", "ik_llama.cpp, plain"]
    made = []
    for (_, target), own in _by(results.rows("systems"), "machine", "target"):
        times = {system: _mean_ms(rows) for (system,), rows in _by(own, "system")}
        if OURS in times and times.keys() & set(systems):
            cells = [f"**{times[system] / times[OURS]:.2f}**" if system in times else "-" for system in systems]
            made.append([results.processor(own[0]), TARGETS[target], *cells])
    return table(["processor", "target", *systems], made)


def how_sure(results: Results) -> str:
    """Spread of the speed-up over the prompts of all sets, and prompts that became slower; then equal tokens."""
    rows = _first_drafters(results.rows("plain"))
    if not rows:
        return ""
    num_same = sum(row["same"] == "1" for row in rows)
    equal = f"Prompts with the tokens of plain decoding: {num_same:,} of {len(rows):,}."
    return f"{_by_processor(results, [{**row, 'set': ''} for row in rows], _spread)}\n\n{equal}"


def machines(results: Results) -> str:
    """The machines of all tables."""
    made = []
    for _, own in _by(results.rows("runs"), "machine"):
        processor, *parts = own[-1]["processor"].partition(", no accelerator")[0].split(", ")
        size = [part for part in parts if part.endswith((" cores", " GiB"))]
        instructions = [part for part in parts if part not in size]
        made.append([results.processor(own[-1]), processor, ", ".join(size), ", ".join(instructions) or "-"])
    made.sort(key=lambda cells: _rank(cells[0]))
    return table(["name", "processor", "size", "instruction sets"], made)


def passes(results: Results) -> str:
    """One pass of one and of eight tokens beside llama.cpp's on the same file."""
    made = []
    for (_, target, file, context), own in _by(results.rows("passes"), "machine", "target", "file", "context"):
        by_width = {row["width"]: row for row in own}
        if context != "0" and {"1", "8"} <= by_width.keys():
            cells = [_pass(by_width[width]) for width in ("1", "8")]
            made.append([results.processor(own[0]), TARGETS[target].partition(",")[0], file, context, *cells])
    titles = ["processor", "target", "file", "context", "one token: ours, llama.cpp's, ratio", "eight tokens"]
    return table(titles, made)


QUESTIONS: dict[str, tuple[str, Callable[[Results], str]]] = {  # block: the benchmark that it shows, and its table
    "headline": ("plain", headline),
    "faster-than-plain": ("plain", faster_than_plain),
    "faster-than-llama-cpp": ("systems", faster_than_llama_cpp),
    "faster-than-python-engines": ("systems", faster_than_python_engines),
    "how-sure": ("plain", how_sure),
    "passes": ("passes", passes),
    "machines": ("", machines),
}


def caption(results: Results, benchmark: str, machine: str = "") -> str:
    """Each processor of a benchmark's runs with its own commits; then versions, and how often a prompt was decoded.

    With ``machine``, only that machine's runs; it is described, and otherwise just named.
    """
    runs = [row for row in results.rows("runs") if row["benchmark"] == benchmark and machine in ("", row["machine"])]
    if not runs:
        return ""
    commits: dict[str, list[str]] = {}
    for row in runs:
        described = row["processor"].partition(", Linux")[0].replace(", no accelerator", "").replace(", ", ": ", 1)
        commits.setdefault(described if machine else results.processor(row), []).append(row["commit"])
    if machine:
        ((described, own),) = commits.items()
        measured = f"{described}, commit{'s' * (len(set(own)) > 1)} {', '.join(_distinct(own))}"
    else:
        measured = "Commits: " + "; ".join(f"{name} {', '.join(_distinct(own))}" for name, own in commits.items())
    versions = ", ".join(
        f"{name} {' or '.join(_distinct(row[name] for row in runs))}" for name in ("torch", "transformers")
    )
    lengths = _distinct(row["tokens"] for row in runs)
    how = (
        f"{' or '.join(lengths)} tokens per prompt; each system decoded each prompt once"
        if lengths
        else "each file run once"
    )
    return f"_{measured}. With {versions}; {how}._"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; empty without rows."""
    if not rows:
        return ""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _by_processor(results: Results, rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> str:
    """A table of ``cell`` of the rows of each target and set, with a column for each processor."""
    processors = _distinct(map(results.processor, sorted(rows, key=lambda row: _rank(results.processor(row)))))
    groups = _by(sorted(rows, key=lambda row: list(TARGETS).index(row["target"])), "target", "set")
    sets, made = {key[1] for key, _ in groups} - {""}, []
    for (target, name), own in groups:
        found = {processor: [row for row in own if results.processor(row) == processor] for processor in processors}
        cells = [cell(each) if each else "-" for each in found.values()]
        if any(each != "-" for each in cells):
            made.append([TARGETS[target], *([SETS[name]] if sets else []), *cells])
    return table(["target", *(["prompts"] if sets else []), *processors], made)


def _rank(processor: str) -> int:
    names = list(PROCESSORS.values())
    return names.index(processor) if processor in names else len(names)


def _by(rows: Iterable[Row], *names: str) -> list[tuple[tuple[str, ...], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def _first_drafters(rows: Sequence[Row]) -> list[Row]:
    """The rows of each run's own plan, without those of plans beside it."""
    own = {key: group[0]["drafters"] for key, group in _by(rows, "target", "machine", "set")}
    return [row for row in rows if row["drafters"] == own[row["target"], row["machine"], row["set"]]]


def _sets(rows: Sequence[Row]) -> list[str]:
    there = {row["set"] for row in rows}
    return [name for name in SETS if name in there]


def _plain(row: Row) -> float:
    return float(row["plain_ms"]) * float(row["tokens"])


def _ours(row: Row) -> float:
    return float(row["ours_ms"]) * float(row["tokens"])


def _total(rows: Sequence[Row]) -> float:
    return sum(map(_plain, rows)) / sum(map(_ours, rows))


def _speed_up(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    tokens = sum(float(row["tokens"]) for row in rows)
    repeats = sum(float(row["repeats"]) * float(row["tokens"]) for row in rows) / tokens
    return f"**{_total(rows):.2f}** ({repeats:.0%})"


def _spread(rows: Sequence[Row]) -> str:
    ratios = [float(row["plain_ms"]) / float(row["ours_ms"]) for row in rows]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f}), {sum(ratio < 1 for ratio in ratios)}"


def _against_llama_cpp(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row["system"] == OURS]
    others = [own for (system,), own in _by(rows, "system") if system.startswith("llama.cpp")]
    if not ours or not others:
        return "-"
    mean = _mean_ms(ours)
    ratios = {own[0]["system"].rpartition(", ")[2]: _mean_ms(own) / mean for own in others}
    best = min(ratio for name, ratio in ratios.items() if name != "plain")
    plain = min(_mean_ms(own) / mean for own in others if own[0]["system"].endswith(", plain"))
    return f"{plain:.2f}, **{best:.2f}**"


def _mean_ms(rows: Sequence[Row]) -> float:
    tokens = sum(float(row["tokens"]) for row in rows)
    return sum(float(row["ms"]) * float(row["tokens"]) for row in rows) / tokens


def _pass(row: Row) -> str:
    ours, theirs = float(row["ours_ms"]), float(row["theirs_ms"])
    return f"{ours:.1f}, {theirs:.1f}: **{ours / theirs:.2f}**"


def processor_name(machine: str) -> str:
    """What the tables call the processor of a machine, as ``Machine`` describes it."""
    found = machine.partition(",")[0].replace("(R)", "").replace(" Processor", "")
    return PROCESSORS.get(found, found)


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))
