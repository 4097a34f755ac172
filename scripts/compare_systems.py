"""Compare Yggdrasil with the systems people would use instead, on one model or pair, the same prompts and threads.

    scripts/compare_systems --plan tiny --prompts unseen.jsonl --limit 12 --llama-cpp work/llama.cpp --json out.json
    scripts/compare_systems --plan tiny --prompts c4.jsonl --prompts wikipedia.jsonl --json systems.json

Every system continues the same token ids greedily by the same number of tokens, prompt by prompt, in turns. A system
that cannot be had says why and is left out. A model without a calibration drafts from the table of the shipped text as
soon as it is counted, some seconds after the first use.

Interrupted, the same command goes on where it stopped. Several sets of prompts share one set-up (models, servers,
compilation), and each gets a file of its own: systems-c4.json and so on.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from bench_systems import EngineSystem, System, judge_by_replay, summarise_systems
from compare_trees import show_systems
from llama_cpp import CACHE_OPTIONS, DRAFT_CACHE_OPTIONS, LlamaCpp, LlamaServer
from prompt_sets import sets_by_name
from python_engines import python_engines
from rich.console import Console
from sample_store import SampleFile, measure, pair_settings
from transformers_systems import transformers_systems

from yggdrasil.bench.compare import encode_prompts
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.engine.loading import DTYPES
from yggdrasil.errors import YggdrasilError
from yggdrasil.pretrained import Decoder
from yggdrasil.prompts import read_prompts
from yggdrasil.scheduling.plan import ModelRef, Plan

LOOK_UPS = {  # llama.cpp's kinds of look-up
    "ngram-cache": "n-gram cache",
    "ngram-simple": "n-gram look-up",
    "ngram-map-k": "n-gram map",
    "ngram-mod": "n-gram hash",
}
OURS, PLAIN = "yggdrasil, by plan", "yggdrasil, plain compiled"
console = Console(stderr=True)


def main(  # noqa: PLR0913 - one argument for each option
    plan: Annotated[str, typer.Option(help="A plan file, a name that has a plan for this machine, or a model.")],
    prompts: Annotated[
        list[Path],
        typer.Option(
            callback=checks.input_file,
            help="JSON lines with a prompt field, unseen by the calibration; can be repeated.",
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate on each.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Keep only the last so many tokens of a prompt.")] = 256,
    dtype: Annotated[Literal["bfloat16", "float32"] | None, typer.Option(help="Default: the plan's.")] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Work folder; llama.cpp is built there once. None: left out.")
    ] = None,
    python_engines_folder: Annotated[
        Path | None,
        typer.Option(
            "--python-engines",
            help="Work folder; OpenVINO GenAI and ik_llama.cpp are installed there once. Only for a GGUF file.",
        ),
    ] = None,
    gguf: Annotated[
        list[Path] | None,
        typer.Option(
            callback=checks.input_file, help="Another GGUF file of the model, for llama.cpp as it is; can be repeated."
        ),
    ] = None,
    draft_tokens: Annotated[
        str, typer.Option(callback=checks.widths, help="Draft lengths of the rivals that have a fixed one.")
    ] = "4,8",
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=checks.output_file, help="Every sample and the summary; resumed if there."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn.")] = False,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave out systems whose name begins like this; can be repeated.")
    ] = None,
    force_machine: Annotated[bool, typer.Option(help="Use a plan that was calibrated on another machine.")] = False,
) -> None:
    """Print one row a system: tokens equal, AAL, TPOT with quartiles, ratio to ours."""
    lengths, files = checks.parse_widths(draft_tokens), sets_by_name(prompts).values()
    decoder = Decoder.from_pretrained(plan, dtype=dtype, force_machine=force_machine)
    assert decoder.plan is not None
    chosen = dtype or decoder.plan.dtype
    sets = [(file, encode_prompts(decoder, read_prompts(file, limit, chat=chat), max_prompt_tokens)) for file in files]
    ways = [way for way in _ways(decoder.plan, chosen, lengths, gguf or []) if _is_wanted(way.name, without)]
    with ExitStack() as running:
        systems: list[System] = [
            EngineSystem(OURS, decoder),
            EngineSystem(PLAIN, decoder, is_plain=True),
            *_transformers(decoder.plan, chosen, lengths, without),
            *_llama_cpp(decoder.plan, chosen, llama_cpp, ways, running),
            *_python_engines(decoder.plan, python_engines_folder, without, running),
        ]
        settings = {
            **pair_settings(decoder.plan, chosen),
            "max_new_tokens": max_new_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "chat": chat,
            "systems": [system.name for system in systems],
        }
        kept = [
            SampleFile(_file_of(out, source, len(sets)), settings | {"prompts_file": source.name}) for source, _ in sets
        ]
        is_warm = False
        for file, (source, texts) in zip(kept, sets, strict=True):
            had = len(file.samples)
            with PhaseProgress() as progress:
                report = progress.phase(f"{source.name}: {len(systems)} systems, {len(texts)} prompts")
                samples = measure(systems, texts, max_new_tokens, file, report, warm_up=not is_warm)
            is_warm = is_warm or len(file.samples) > had
            rows = summarise_systems(systems, samples, OURS, judge_by_replay(decoder, texts))
            file.save(rows)
            show_systems(rows)


def _file_of(out: Path | None, prompts: Path, num_sets: int) -> Path | None:
    """Where the samples of one set go."""
    return out if out is None or num_sets == 1 else out.with_name(f"{out.stem}-{prompts.stem}{out.suffix}")


def _is_wanted(name: str, without: list[str] | None) -> bool:
    return not any(name.startswith(beginning) for beginning in without or ())


def _drafter(plan: Plan) -> ModelRef | None:
    """The plan's draft model, which rivals draft with too; a head is none of its own, and they do not know its kind."""
    model = plan.drafter
    return model if isinstance(model, ModelRef) and not is_head(model.path()) else None


def _transformers(plan: Plan, dtype: str, lengths: Sequence[int], without: list[str] | None) -> list[System]:
    if not _is_wanted("transformers", without):
        return []  # a GGUF file is not dequantised for nothing
    drafter, threads, max_length = _drafter(plan), plan.target.threads, plan.shapes.max_length
    second = _folder(drafter.path(), dtype) if drafter else None
    target = _folder(plan.target.path(), dtype)
    systems = transformers_systems(target, second, DTYPES[dtype], threads, max_length, lengths)
    return [system for system in systems if _is_wanted(system.name, without)]


def _folder(model: str, dtype: str) -> str:
    """The checkpoint folder of a model, whichever way it was given."""
    return str(Source.find(model).checkpoint(DTYPES[dtype]))


def _llama_cpp(plan: Plan, dtype: str, work: Path | None, ways: "list[_Way]", running: ExitStack) -> Iterator[System]:
    """Its server, once for each way of decoding that can be had."""
    if work is None:
        console.print("llama.cpp: left out, give --llama-cpp FOLDER to build it there")
        return
    llama = LlamaCpp(work, lambda text: console.print(text, markup=False))
    common = ["--ctx-size", str(plan.shapes.max_length), "--threads", str(plan.target.threads), *CACHE_OPTIONS[dtype]]
    try:
        llama.build(os.cpu_count() or 1)
        console.print(llama.version(), markup=False)
        for number, way in enumerate(ways):
            models = [part for option, source in way.models for part in (option, str(_gguf(llama, source, dtype)))]
            command = [str(llama.server), *models, *common, *way.options]
            log = work / f"server-{number}.log"
            yield running.enter_context(LlamaServer(way.name, way.family, command, log, is_plain=way.is_plain))
    except YggdrasilError as error:
        console.print(f"left out: {error}", markup=False)


def _python_engines(plan: Plan, work: Path | None, without: list[str] | None, running: ExitStack) -> Iterator[System]:
    """OpenVINO GenAI and ik_llama.cpp on the plan's GGUF file."""
    file = Source.find(plan.target.path()).gguf
    if work is not None and file is not None:
        yield from python_engines(
            work,
            file.resolve(),
            plan.target.threads,
            plan.shapes.max_length,
            lambda name: _is_wanted(name, without),
            running,
            lambda text: console.print(text, markup=False),
        )


class _Way(NamedTuple):
    """One way in which llama.cpp decodes; ``models`` are options with the checkpoint or GGUF file each names."""

    name: str
    family: str
    models: list[tuple[str, str]]
    options: list[str]

    @property
    def is_plain(self) -> bool:
        return not self.options


def _ways(plan: Plan, dtype: str, lengths: Sequence[int], files: list[Path]) -> list[_Way]:
    """The plan's own weights plainly, with its draft model and with each look-up; then GGUF files of the model.

    A plan that decodes a GGUF file's blocks as they are is compared on the file alone. If it decodes them dequantised,
    llama.cpp gets the dequantised weights, too.
    """
    own = Source.find(plan.target.path()).gguf
    files = list({file.resolve(): file for file in (*([own] if own else []), *files)}.values())
    return [*([] if plan.target.weights == "file" else _ways_dequantised(plan, dtype, lengths)), *_ways_of(files)]


def _ways_dequantised(plan: Plan, dtype: str, lengths: Sequence[int]) -> list[_Way]:
    target = [("--model", _folder(plan.target.path(), dtype))]
    ways = [_Way("llama.cpp, plain", "llama.cpp", target, [])]
    if (drafter := _drafter(plan)) is not None:
        draft = ["--spec-type", "draft-simple", "--spec-draft-threads", str(drafter.threads)]
        draft += DRAFT_CACHE_OPTIONS[dtype]
        both = [*target, ("--spec-draft-model", _folder(drafter.path(), dtype))]
        ways += [
            _Way(f"llama.cpp, draft model, {n} tokens", "llama.cpp", both, [*draft, "--spec-draft-n-max", str(n)])
            for n in lengths
        ]
    return ways + [
        _Way(f"llama.cpp, {name}", "llama.cpp", target, ["--spec-type", kind]) for kind, name in LOOK_UPS.items()
    ]


def _ways_of(files: Sequence[Path]) -> list[_Way]:
    ways = []
    for file in files:
        family, model = f"llama.cpp on {file.stem}", [("--model", str(file))]
        ways.append(_Way(f"{family}, plain", family, model, []))
        ways += [_Way(f"{family}, {name}", family, model, ["--spec-type", kind]) for kind, name in LOOK_UPS.items()]
    return ways


def _gguf(llama: LlamaCpp, source: str, dtype: str) -> Path:
    return Path(source) if source.endswith(".gguf") else llama.convert(source, dtype)


if __name__ == "__main__":
    run_script(main, "compare_systems")
