"""Measure what `yggdrasil export` chooses for llama-server, in turns with its defaults and with a grid of settings.

    scripts/check_export --plan smollm2 --prompts prompts --llama-cpp work/llama.cpp --json export.json

Each set of prompts gets settings of its own, chosen on prompts of the set that are not measured. Every setting decodes
every prompt once, and those that did best twice more: which one wins differs from prompt to prompt, and one answer's
time by a third from the next. A round's servers are new ones, since one that has answered a prompt may know the answer;
of its rounds a prompt's fastest counts. The plan's target must be a GGUF file, and its drafter no model. On two idle
cores and a model of 135M everything takes about 45 minutes; an interrupted run goes on where it stopped.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from bench_systems import Sample, System, summarise_systems
from llama_cpp import LlamaCpp, LlamaServer
from rich.console import Console
from sample_store import SampleFile, measure

from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.errors import YggdrasilError
from yggdrasil.export.exporting import Exported, Request, export
from yggdrasil.export.settings import ENGINES
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.scheduling.plan import Plan

SETS = {"spec_bench": True, "c4": False, "cnndm": False, "humaneval": False}  # file -> whether it is a chat's
NONE = ("--spec-type", "none")
DEFAULTS = {f"default {kind}": ("--spec-type", kind) for kind in ("ngram-simple", "ngram-mod", "ngram-cache")}
SIMPLE, MOD = ((1, 2), (2, 3), (2, 4), (3, 8), (4, 8), (4, 16)), ((2, 1, 4), (3, 1, 8))  # the grid's lengths
PROMPT_TOKENS, CHOSEN_ON = 256, 60  # kept of a prompt; prompts that settings are chosen on
ROUNDS, FINALISTS = 3, 3  # settings of the grid that are measured in all rounds
WARM = tuple(range(1000, 1064))  # tokens of no prompt, for a server that has just started
AS_FAST = 1.03  # times the grid's best
_ROUND = ", round "  # between a prompt's name and the number of its round
console = Console(stderr=True)


class Way(NamedTuple):
    """Settings, and on which sets they are measured."""

    name: str
    options: tuple[str, ...]
    sets: tuple[str, ...] = tuple(SETS)


def main(
    plan: Annotated[str, typer.Option(help="A plan file, or a name that has a plan for this machine.")],
    prompts: Annotated[Path, typer.Option(help="Folder with spec_bench, c4, cnndm and humaneval as .jsonl files.")],
    llama_cpp: Annotated[Path, typer.Option(help="Work folder; llama.cpp is built there once.")],
    limit: Annotated[int, typer.Option(min=1, help="Prompts measured of each set.")] = 20,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each answer.")] = 96,
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=checks.output_file, help="Samples, a file a set; resumed if there."),
    ] = None,
) -> None:
    """Print one line a set, and fail where a chosen setting is more than 3 % slower than the grid's best."""
    found = Plan.load(resolve_plan(plan, current_machine()))
    gguf = Source.find(found.target.path()).gguf
    if gguf is None:
        raise YggdrasilError(f"{plan} is of no GGUF file, which llama-server needs; calibrate one")
    llama = LlamaCpp(llama_cpp, lambda text: console.print(text, markup=False))
    llama.build(os.cpu_count() or 1)
    _check_options(llama)
    command = [str(llama.server), "--model", str(gguf), "--threads", str(found.target.threads), "--ctx-size", "2048"]
    with tempfile.TemporaryDirectory() as folder:
        texts, others = {}, {}
        for name in SETS:
            texts[name], others[name] = _split(prompts / f"{name}.jsonl", found, limit, Path(folder))
        with _plain(command, llama_cpp) as plain:
            chosen = _choose(plan, plain, others, tokens, Path(folder))
    ways = _ways(chosen)
    files = {name: _file(name, ways, chosen[name], tokens, out) for name in SETS}
    ours = {name: _ours(ways, chosen[name]) for name in SETS}
    for number in range(ROUNDS):
        with _started(command, ways, llama_cpp) as systems:
            for name in SETS:
                _measure(name, number, texts[name], _here(name, ways, systems), tokens, files[name])
        if number == 0:
            ratios = {name: _ratios(_here(name, ways, systems), ours[name], files[name]) for name in SETS}
            ways = _finalists(ways, ratios)
    slow = [_told(name, _here(name, ways, systems), ours[name], chosen[name], files[name]) for name in SETS]
    if any(slow):
        raise YggdrasilError(f"slower than the grid's best by more than 3 %: {', '.join(filter(None, slow))}")


def _check_options(llama: LlamaCpp) -> None:
    """Every option that may be written is one of this build's."""
    known = subprocess.run([llama.server, "--help"], capture_output=True, text=True, check=False).stdout
    missing = [option for option in ENGINES["llama-server"].options if option not in known]
    if missing:
        raise YggdrasilError(f"{llama.version()} does not know {', '.join(missing)}")
    console.print(f"{llama.version()} knows all options that export writes", markup=False)


def _split(file: Path, plan: Plan, limit: int, folder: Path) -> tuple[dict[str, list[int]], Path]:
    """Tokens of the prompts that are measured, by id, and a file of the others."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    measured = {i * len(lines) // limit for i in range(limit)}
    left = folder / file.name
    left.write_text("\n".join(line for i, line in enumerate(lines) if i not in measured), encoding="utf-8")
    tokenizer = load_tokenizer(plan.target.path())
    wanted = [prompt for i, prompt in enumerate(read_prompts(file, chat=SETS[file.stem])) if i in measured]
    return {prompt.id: encode_prompt(tokenizer, prompt)[-PROMPT_TOKENS:] for prompt in wanted}, left


def _choose(plan: str, server: LlamaServer, files: dict[str, Path], tokens: int, folder: Path) -> dict[str, Exported]:
    """Settings for each set; costs are measured once."""
    chosen: dict[str, Exported] = {}
    costs = folder / "costs.json"
    with PhaseProgress() as progress:
        for name, file in files.items():
            chosen[name] = export(
                Request(
                    plan, "llama-server", server.address, costs=costs if costs.exists() else None, prompts=file,
                    chat=SETS[name], limit=CHOSEN_ON, tokens=tokens, prompt_tokens=PROMPT_TOKENS,
                ),
                progress,
            )  # fmt: skip
            costs.write_text(json.dumps(vars(chosen[name].costs)))
    return chosen


def _ways(chosen: dict[str, Exported]) -> list[Way]:
    """Defaults, the grid, and what was chosen for a set if it is none of them."""
    ways = [Way(name, options) for name, options in DEFAULTS.items()]
    for match, length in SIMPLE:
        sizes = ("--spec-ngram-simple-size-n", str(match), "--spec-ngram-simple-size-m", str(length))
        ways.append(Way(f"ngram-simple {match} {length}", ("--spec-type", "ngram-simple", *sizes)))
    for match, least, most in MOD:
        sizes = ("--spec-ngram-mod-n-match", str(match), "--spec-ngram-mod-n-min", str(least))
        options = ("--spec-type", "ngram-mod", *sizes, "--spec-ngram-mod-n-max", str(most))
        ways.append(Way(f"ngram-mod {match} {least} {most}", options))
    for name, exported in chosen.items():
        options = _options(exported)
        same = next((i for i, way in enumerate(ways) if way.options == options), None)
        if same is not None and ways[same].sets != tuple(SETS):
            ways[same] = ways[same]._replace(sets=(*ways[same].sets, name))
        elif same is None and options != NONE:
            ways.append(Way(f"export {name}", options, (name,)))
    return ways


def _options(exported: Exported) -> tuple[str, ...]:
    return tuple(str(part) for pair in exported.settings.options.items() for part in pair)


def _plain(command: list[str], llama_cpp: Path) -> LlamaServer:
    return LlamaServer("none", "llama.cpp", [*command, *NONE], llama_cpp / "export-none.log", is_plain=True)


@contextmanager
def _started(command: list[str], ways: list[Way], llama_cpp: Path) -> Iterator[dict[str, LlamaServer]]:
    """A server of every way and a plain one, each of which has decoded something."""
    with ExitStack() as running:
        systems = {"none": running.enter_context(_plain(command, llama_cpp))}
        for way in ways:
            log = llama_cpp / f"export-{way.name.replace(' ', '-')}.log"
            server = LlamaServer(way.name, "llama.cpp", [*command, *way.options], log)
            systems[way.name] = running.enter_context(server)
        for server in systems.values():
            server.decode(WARM, 16)
        yield systems


def _here(name: str, ways: list[Way], systems: dict[str, LlamaServer]) -> list[System]:
    """What is measured on a set."""
    return [systems["none"], *(systems[way.name] for way in ways if name in way.sets)]


def _file(name: str, ways: list[Way], exported: Exported, tokens: int, out: Path | None) -> SampleFile:
    """Where the samples of a set go."""
    settings: dict[str, Any] = {"set": name, "tokens": tokens, "rounds": ROUNDS, "ours": _ours(ways, exported)}
    settings["exported"] = exported.as_dict()
    for measured_anew in ("costs", "predicted", "remarks"):
        settings["exported"].pop(measured_anew)
    return SampleFile(None if out is None else out.with_name(f"{out.stem}-{name}{out.suffix}"), settings)


def _ours(ways: list[Way], exported: Exported) -> str:
    return next((way.name for way in ways if way.options == _options(exported)), "none")


def _measure(
    name: str, number: int, texts: dict[str, list[int]], here: list[System], tokens: int, file: SampleFile
) -> None:
    """One set in turns, once."""
    prompts = {f"{prompt}{_ROUND}{number}": text for prompt, text in texts.items()}
    with PhaseProgress() as progress:
        # Nothing is repeated to warm up: some settings would then know the answer.
        report = progress.phase(f"{name}, round {number + 1} of {ROUNDS}: {len(here)} settings")
        measure(here, prompts, tokens, file, report, is_timed=False)


def _ratios(here: list[System], ours: str, file: SampleFile) -> dict[str, float]:
    """How many times our time each system of ``here`` takes, by the fastest round of each prompt."""
    rows = summarise_systems(here, _fastest(file.samples), ours)
    return {row["system"]: row["total_ratio_to_ours"] for row in rows}


def _finalists(ways: list[Way], ratios: Mapping[str, Mapping[str, float]]) -> list[Way]:
    """On each set what was chosen for it, the fastest of the grid and the fastest default."""
    kept: dict[str, set[str]] = {}
    for name, found in ratios.items():
        fastest = sorted(found, key=lambda each: found[each])
        grid = [each for each in fastest if each.startswith("ngram")]
        default = [each for each in fastest if each.startswith("default")]
        chosen = [each for each in fastest if each.startswith("export") or found[each] == 1.0]
        kept[name] = {*grid[:FINALISTS], *default[:1], *chosen}
    left = [way._replace(sets=tuple(name for name in way.sets if way.name in kept[name])) for way in ways]
    return [way for way in left if way.sets]


def _fastest(samples: Sequence[Sample]) -> list[Sample]:
    """Of each system and prompt the fastest round: what differs is what else the machine did."""
    found: dict[tuple[str, str], Sample] = {}
    for sample in samples:
        prompt = sample.prompt.rpartition(_ROUND)[0]
        known = found.get((prompt, sample.system))
        if known is None or sample.continuation.tpot_ms < known.continuation.tpot_ms:
            found[prompt, sample.system] = replace(sample, prompt=prompt)
    return list(found.values())


def _told(name: str, here: list[System], ours: str, exported: Exported, file: SampleFile) -> str | None:
    """Print a set's line; returns its name where the chosen settings are too slow."""
    rows = summarise_systems(here, _fastest(file.samples), ours)
    file.save(rows)
    ratio = {row["system"]: row["total_ratio_to_ours"] for row in rows}
    grid = min((each for each in ratio if each.startswith("ngram")), key=lambda each: ratio[each])
    default = min((each for each in ratio if each.startswith("default")), key=lambda each: ratio[each])
    predicted = exported.settings.predicted
    print(
        f"{name}: {exported.settings.line}\n  {ratio['none']:.2f} x plain ({predicted.speedup:.2f} predicted), "
        f"{ratio[default]:.2f} x the best default ({default}), {ratio[grid]:.3f} x the grid's best ({grid}); the same "
        f"tokens on {min(row['same_as_ours'] for row in rows)} of {rows[0]['prompts']} prompts",
        flush=True,
    )
    return name if 1.0 / ratio[grid] > AS_FAST else None


if __name__ == "__main__":
    run_script(main, "check_export")
