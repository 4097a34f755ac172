"""Compare single passes with llama.cpp's: the same GGUF files, the same threads, in turns in one run.

    scripts/compare_steps models/smollm2 --llama-cpp work/llama.cpp --prompts chats.jsonl --json steps.json
    scripts/compare_steps models/1B --llama-cpp work/llama.cpp --contexts 64 --prefill-rounds 5 --json steps.json

llama.cpp converts a checkpoint and rounds it to each format; a GGUF file is taken as it is. Both sides load that file.
A pass of W tokens is a plain step or the verification of a tree of W nodes, choice and acceptance included;
llama.cpp's is one ``llama_decode`` with the logits of all W rows, which verification needs. With ``--prompts`` both
also continue some greedily, and where their tokens part ours are replayed, which tells a near tie from a fault. The
first run on a machine compiles for minutes.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Annotated, Any, NamedTuple, Protocol

import pandas as pd
import torch
import typer
from llama_cpp import LlamaCpp
from llama_cpp_steps import LlamaSteps
from rich.console import Console
from roofline import measure_rates, step_work
from step_times import show_table

from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.divergence import judge_divergence
from yggdrasil.bench.record import provenance, public_source
from yggdrasil.bench.spread import spread
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.pair import build_assembly
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.checks import parse_widths
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.scheduling.plan import Shapes

FORMATS = ("bf16", "q8_0", "q4_0", "q4_k_m")
SETTLE_SECONDS = 0.006  # idle threads of the other side spin for a while
READ_TOKENS = 512  # of the prompt whose reading is timed
MOST_PROMPT_TOKENS = 1500
console = Console(stderr=True)


class Workload(NamedTuple):
    """What is timed and written on every file."""

    passes: list[tuple[int, int, int]]  # context, width, rounds; a pass behind nothing reads a prompt
    threads: int
    prompts: Path | None
    limit: int
    max_new_tokens: int


class Side(Protocol):
    """One of the two that take turns."""

    def time(self, context: int, width: int) -> float:
        """Milliseconds of one pass; the pass before it is not counted. Behind nothing it reads a prompt."""

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` likeliest tokens behind ``prompt``, one by one."""


def main(  # noqa: PLR0913 - one argument for each option
    model: Annotated[
        str, typer.Argument(help="A checkpoint folder in bf16, or a GGUF file, which is compared as it is.")
    ],
    llama_cpp: Annotated[Path, typer.Option(help="Work folder; llama.cpp is built there once.")],
    formats: Annotated[str, typer.Option(help="Files to compare on.")] = ",".join(FORMATS),
    widths: Annotated[str, typer.Option(help="Tokens of a pass.")] = "1,2,4,8,16,32",
    contexts: Annotated[str, typer.Option(help="Tokens in the caches.")] = "64,1024",
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes of each kind and side.")] = 15,
    prefill_rounds: Annotated[int, typer.Option(min=1, help=f"Timed prefills of {READ_TOKENS} tokens.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Of both sides.")] = os.cpu_count() or 1,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines: continue some as chats on both sides.")] = None,
    limit: Annotated[int, typer.Option(help="Use at most so many prompts.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate on each.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=checks.output_file, help="Write the result here, after every file."),
    ] = None,
) -> None:
    """Print one row a file, context and width: both sides' medians, and the share of the machine's limits."""
    chosen = ["file"] if model.endswith(".gguf") else formats.split(",")
    if unknown := sorted(set(chosen) - {"file", *FORMATS}):
        raise YggdrasilError(f"--formats {','.join(unknown)} is not known; choose from {', '.join(FORMATS)}")
    passes = [(context, width, rounds) for context in parse_widths(contexts) for width in parse_widths(widths)]
    workload = Workload([*passes, (0, READ_TOKENS, prefill_rounds)], threads, prompts, limit, max_new_tokens)
    llama = LlamaCpp(llama_cpp, lambda text: console.print(text, markup=False))
    llama.build(os.cpu_count() or 1)
    record: dict[str, Any] = {
        **provenance(), "model": public_source(model), "llama_cpp": llama.version(), "dtype": "bfloat16",
        "threads": threads, "rounds": rounds, "prefill_rounds": prefill_rounds, "complete": False, "files": [],
    }  # fmt: skip
    for kind in chosen:
        file = Path(model) if kind == "file" else llama.quantised(model, kind)
        record["files"].append(_compare(kind, file, llama.steps_program(), workload))
        record["complete"] = kind == chosen[-1]
        if out is not None:
            write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    _show(record["files"])


class OurSteps:
    """Our side: the steps that decode a file."""

    def __init__(self, assembly: Assembly, tokenizer: Any) -> None:
        self.decoder = Decoder(assembly, tokenizer, PLAIN_POLICY, frozenset())
        self._engine = assembly.engine

    @torch.inference_mode()
    def time(self, context: int, width: int) -> float:
        target = self._engine.target
        if context == 0:
            tokens = [100 + i * 37 % 1000 for i in range(width)]
            return _milliseconds(lambda: list(target.prefill(tokens)))
        target.text.pretend([1] * context, context)  # what the caches hold means nothing
        self._engine.tree.plant(1)
        run: Callable[[], object] = partial(target.plain, 1) if width == 1 else partial(target.verify, width)
        run()
        return _milliseconds(run)

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        self.decoder.forget()
        return self.decoder.generate(prompt, max_new_tokens=count, ignore_eos=True, speculation=False).tokens


def _milliseconds(run: Callable[[], object]) -> float:
    start = perf_counter_ns()
    run()
    return (perf_counter_ns() - start) / 1e6


def _compare(kind: str, file: Path, program: Path, workload: Workload) -> dict[str, Any]:
    """All that is known of one file."""
    widths = tuple(sorted({width for context, width, _ in workload.passes if context}))
    longest = max(context + width for context, width, _ in workload.passes) + 1
    shapes = Shapes(max_length=max(2048, longest), draft_widths=(), verify_widths=widths)
    weights: Weights = "full" if kind == "bf16" else "file"
    source = PairSource(
        str(file), None, "bfloat16", workload.threads, 1, shapes, weights, model_free=(StatisticsOptions(),)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # PyTorch's idle threads would spin on the cores that our operators use
    with PhaseProgress() as progress, LlamaSteps(program, file, workload.threads, shapes.max_length) as theirs:
        assembly = build_assembly(source)
        loaded = assembly.target.loaded
        assembly.complete(progress.phase)
        ours = OurSteps(assembly, load_tokenizer(source.target))
        rates = [measure_rates(loaded)]
        found = _in_turns((ours, theirs), workload.passes, progress.phase(f"{kind}: passes in turns"))
        rates.append(measure_rates(loaded))
        text = _texts(ours, theirs, workload, progress.phase(f"{kind}: the same text")) if workload.prompts else None
    torch.set_num_threads(before)
    best = max(rates, key=lambda rate: rate.bytes_per_s)
    work = {key: step_work(loaded, key[1], key[0]) for key in found}
    return {
        "format": kind,
        "file_megabytes": file.stat().st_size / 1e6,
        "bandwidth_gb_s": best.bytes_per_s / 1e9,
        "passes": [
            {
                "context": key[0], "width": key[1], "ours_ms": _figures(own), "theirs_ms": _figures(other),
                "megabytes": work[key].num_bytes / 1e6, "least_ms": best.least_ms(work[key]),
            }
            for key, (own, other) in found.items()
        ],
        "text": text,
    }  # fmt: skip


def _figures(samples: Sequence[float]) -> dict[str, Any]:
    return {**spread(samples), "least": min(samples)}


def _in_turns(
    sides: tuple[Side, Side], passes: Sequence[tuple[int, int, int]], progress: Callable[[float], None]
) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
    """Milliseconds of both sides, by context and width."""
    found: dict[tuple[int, int], tuple[list[float], list[float]]] = {
        (context, width): ([], []) for context, width, _ in passes
    }
    turns = max(rounds for *_, rounds in passes)
    for turn in range(turns):
        step = 1 if turn % 2 == 0 else -1  # backwards too: who comes first behind another finds colder caches
        for context, width, rounds in passes[::step]:
            both = list(zip(sides, found[context, width], strict=True))[::step]
            for side, samples in both if turn < rounds else ():
                sleep(SETTLE_SECONDS)
                samples.append(side.time(context, width))
        progress((turn + 1) / turns)
    return found


def _texts(ours: OurSteps, theirs: Side, workload: Workload, progress: Callable[[float], None]) -> dict[str, Any]:
    """Greedy continuations of the same prompts on both sides, and what becomes of those that part."""
    assert workload.prompts is not None
    requests, partings = read_prompts(workload.prompts, workload.limit, chat=True), []
    for number, request in enumerate(requests, start=1):
        prompt = encode_prompt(ours.decoder.tokenizer, request)[-MOST_PROMPT_TOKENS:]
        own, other = (side.continued(prompt, workload.max_new_tokens) for side in (ours, theirs))
        if (parting := judge_divergence(ours.decoder, prompt, own, other, is_ours=False)) is not None:
            partings.append({"prompt": request.id, **asdict(parting)})
        progress(number / len(requests))
    return {"prompts": len(requests), "max_new_tokens": workload.max_new_tokens, "partings": partings}


def _show(files: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for file in files:
        plain = {one["context"]: one["ours_ms"] for one in file["passes"] if one["width"] == 1}
        for one in file["passes"]:
            ours, theirs = one["ours_ms"], one["theirs_ms"]
            rows.append(
                {
                    "file": file["format"], "context": one["context"], "width": one["width"],
                    "ours ms": ours["median"], "least": ours["least"], "llama.cpp ms": theirs["median"],
                    "its least": theirs["least"], "ours over it": ours["median"] / theirs["median"],
                    "of least": ours["least"] / theirs["least"],
                    "over W=1": ours["median"] / plain[one["context"]]["median"] if one["context"] else float("nan"),
                    "MB": one["megabytes"], "limit ms": one["least_ms"], "share": one["least_ms"] / ours["median"],
                }
            )  # fmt: skip
    show_table("passes in turns with llama.cpp", pd.DataFrame(rows))
    for file in files:
        print(
            f"{file['format']}: {file['file_megabytes']:.0f} MB; this machine reads {file['bandwidth_gb_s']:.1f} GB/s"
        )
        if (text := file["text"]) is not None:
            ties = sum(parting["verdict"] == "tie" for parting in text["partings"])
            equal = text["prompts"] - len(text["partings"])
            print(f"  the same text on {equal} of {text['prompts']} prompts, parting at a tie on {ties}")


if __name__ == "__main__":
    run_script(main, "compare_steps")
