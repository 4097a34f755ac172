#!/usr/bin/env python3
"""What a person waits for: the first token of a chat's second turn, and of a model that this machine has never run.

    scripts/measure_waiting.py turns --plan smollm2 --json turns.json
    scripts/measure_waiting.py first-contact my/model --json first-contact.json
    scripts/measure_waiting.py first-contact my/model.gguf --llama-cpp ~/llama --rounds 3 --max-new-tokens 1

``turns`` asks about a long text, then asks on, and compares with a short prompt. ``first-contact`` runs `yggdrasil
generate` in processes of their own, with a copy of the package beside which no plan lies and with an empty cache, and
once more with what that left, as soon as nothing works in the background. With ``--llama-cpp`` it runs llama.cpp's
`llama-completion` on the same file in between: the program for one answer, which older versions call llama-cli.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated, Any

import typer
from llama_cpp import LlamaCpp
from rich.console import Console

from yggdrasil.artifacts import write_atomic
from yggdrasil.artifacts.gguf import is_gguf
from yggdrasil.artifacts.machine import usable_cores
from yggdrasil.artifacts.templates import lacks_chat_template
from yggdrasil.bench.record import provenance, public_source
from yggdrasil.cli import checks
from yggdrasil.cli.exit_codes import run_guarded
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.request import Generation
from yggdrasil.errors import YggdrasilError

PACKAGE = Path(__file__).resolve().parents[1] / "yggdrasil"
WORDS = (PACKAGE / "assets" / "prompts" / "humaneval.jsonl").read_text(encoding="utf-8")  # any text that is long
SHORT_TOKENS, ANSWER_TOKENS = 50, 16
ROOM = 200  # for the template, two answers and the second question
QUESTION = "Why is the sky blue?"
EMPTY, FULL = "empty: nothing compiled, no plan", "full: the same command again"
THEIR_CONTEXT = 8192  # tokens; by default llama.cpp allocates the model's whole context
console = Console(stderr=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Out = Annotated[Path | None, typer.Option("--json", callback=checks.output_file, help="Write the result here.")]


@app.command()
def turns(
    plan: Annotated[str, typer.Option(help="A plan file or name, of a chat model.")],
    history: Annotated[
        list[int] | None, typer.Option(help="Tokens of the first question; can be repeated. Default: 500, and 2000.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times everything is asked; medians are kept.")] = 5,
    out: Out = None,
) -> None:
    """Time to the first token of a second turn, beside a short prompt's and the first turn's."""
    decoder = Decoder.from_plan(plan)
    assert decoder.plan is not None
    for number in range(2):  # loads the steps
        _short(decoder, number)
    short, cases = [], []
    for length in history or (500, min(2000, decoder.plan.shapes.max_length - ROOM)):
        found = []
        for number in range(rounds):
            short.append(_short(decoder, number).metrics.ttft_ms)
            found.append(_two_turns(decoder, length, number))
        first, second = found[-1]
        cases.append(
            {
                "history_tokens": first.prompt_tokens,
                "prompt_tokens": second.prompt_tokens,
                "reused_tokens": second.metrics.reused_tokens,
                "first_turn_ms": statistics.median(one.metrics.ttft_ms for one, _ in found),
                "second_turn_ms": statistics.median(two.metrics.ttft_ms for _, two in found),
            }
        )
    record = {
        **provenance(),
        "plan": decoder.plan.name,
        "dtype": decoder.plan.dtype,
        "rounds": rounds,
        "short_prompt_tokens": SHORT_TOKENS,
        "short_prompt_ms": statistics.median(short),
        "cases": cases,
    }
    _keep(record, out)


@app.command("first-contact")
def first_contact(
    model: Annotated[str, typer.Argument(help="A folder, a hub id or a .gguf file.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Runs with full caches; medians are kept.")] = 1,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Also run llama.cpp on the GGUF file MODEL, built in this folder.")
    ] = None,
    out: Out = None,
) -> None:
    """Seconds from the command to the first token and to its end, with empty caches and with full ones."""
    source = str(Path(model).resolve()) if Path(model).exists() else model
    is_chat = not (Path(source).exists() and lacks_chat_template(Path(source)))
    found: dict[str, list[dict[str, float]]] = {}
    theirs: list[str] = []
    if llama_cpp is not None:
        if not is_gguf(Path(source)):
            raise YggdrasilError(f"{model} is no GGUF file, which --llama-cpp needs")
        llama = LlamaCpp(llama_cpp, lambda step: console.print(step, highlight=False))
        llama.build(os.cpu_count() or 1)
        theirs = completion_command(llama.completion, source, max_new_tokens, is_chat=is_chat)
    with tempfile.TemporaryDirectory(prefix="yggdrasil-first-contact-") as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / "yggdrasil", ignore=shutil.ignore_patterns("__pycache__"))
        for title in (EMPTY, *[FULL] * rounds):
            _wait_for_others(folder)
            found.setdefault(title, []).append(_generate(folder, source, max_new_tokens, is_chat=is_chat))
            if theirs:
                found.setdefault("llama.cpp: llama-completion", []).append(watched(theirs, folder, dict(os.environ)))
        _wait_for_others(folder)
    cases = [
        {"name": title, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}}
        for title, runs in found.items()
    ]
    about = {"model": public_source(source), "max_new_tokens": max_new_tokens, "rounds": rounds}
    _keep({**provenance(), **about, "cases": cases}, out)


def _short(decoder: Decoder, number: int) -> Generation:
    """Another short prompt each time, so that nothing of it is in the caches."""
    tokens = decoder.encode(f"{number} {WORDS[40 * number :]}"[:2000])[:SHORT_TOKENS]
    return decoder.generate(tokens, max_new_tokens=2, ignore_eos=True)


def _two_turns(decoder: Decoder, length: int, number: int) -> tuple[Generation, Generation]:
    text = decoder.tokenizer.decode(decoder.tokenizer(WORDS)["input_ids"][number : number + length])
    first = {"role": "user", "content": f"{number}. What does this say?\n{text}"}
    answer = decoder.chat([first], max_new_tokens=ANSWER_TOKENS)
    history = [first, {"role": "assistant", "content": answer.text}]
    asked_on = decoder.chat([*history, {"role": "user", "content": QUESTION}], max_new_tokens=ANSWER_TOKENS)
    return answer, asked_on


def _generate(folder: Path, model: str, max_new_tokens: int, *, is_chat: bool) -> dict[str, float]:
    """Run `yggdrasil generate` with the package and the caches of ``folder``."""
    options = ["--prompt", QUESTION, "--max-new-tokens", str(max_new_tokens), *(["--chat"] if is_chat else [])]
    command = [sys.executable, "-c", "from yggdrasil.cli import main; main()", "generate", model, *options]
    temporary = folder / "tmp"  # where PyTorch keeps headers that it compiled
    temporary.mkdir(exist_ok=True)
    places = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(temporary)}
    environment = {**os.environ, **places}
    environment.pop("YGGDRASIL_CACHE", None)
    return watched(command, folder, environment)


def completion_command(program: Path, file: str, max_new_tokens: int, *, is_chat: bool) -> list[str]:
    """The command of llama.cpp for one greedy answer on all cores, without the pass that warms it up."""
    chat = ["--conversation", "--single-turn"] if is_chat else ["--no-conversation"]
    sizes = ["--ctx-size", str(THEIR_CONTEXT), "--threads", str(usable_cores()), "--predict", str(max_new_tokens)]
    answer = ["--prompt", QUESTION, "--no-display-prompt", "--temp", "0", "--no-warmup", "--simple-io", "--offline"]
    return [str(program), "--model", file, *chat, *sizes, *answer]


def _wait_for_others(folder: Path) -> None:
    """Wait until no process has ``folder`` in its environment: the first start counts the shipped text in another."""
    while any(str(folder).encode() in _environment(process) for process in Path("/proc").iterdir()):
        sleep(0.2)


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # no process, one that has ended, or another user's
        return b""


def watched(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Run the command in ``folder`` and time its standard output; the first token is the first text that is no space.

    Raises:
        YggdrasilError: it failed, or printed nothing.
    """
    start, first, peak = perf_counter(), 0.0, 0.0
    log = folder / "stderr.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=folder
        )
    assert process.stdout is not None
    while piece := os.read(process.stdout.fileno(), 4096):
        if not first and piece.strip():
            first = perf_counter() - start
        peak = max(peak, _peak_mb(process.pid))
    process.wait()
    if process.returncode or not first:
        last = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise YggdrasilError(f"`{' '.join(command)}` ended with {process.returncode}: {' '.join(last)}")
    return {"first_token_s": first, "whole_s": perf_counter() - start, "peak_mb": peak}


def _peak_mb(process: int) -> float:
    """The most memory that the process itself held so far, without those that it had compile or prepare for it."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0  # it has just ended


def _keep(record: dict[str, Any], out: Path | None) -> None:
    console.print_json(data=record["cases"])
    if out is not None:
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    run_guarded(lambda: app, "measure_waiting")
