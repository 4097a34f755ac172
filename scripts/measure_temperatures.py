#!/usr/bin/env python3
"""Time of a plan over plain decoding at several temperatures, of a text's beginning and of what follows it, in turns.

    scripts/measure_temperatures.py --plan smollm2 chats.jsonl c4.jsonl humaneval.jsonl --limit 6 --json out.json

What speculation may lose is bounded by a grant and a share of the steps, so the beginning of a first text is where it
can lose most: times are taken up to a token and from there on, over all prompts of a file together. Below 1, the plan
is faster. Both ways draw with the same seed and must write the same tokens; if any differ, the exit code is 1.
Prompts are taken evenly from each file and go on behind the model's end.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.guard import nothing_built
from yggdrasil.bench.record import pair_settings, provenance
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.progress import wide_console
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import encode_prompt, read_prompts, sets_by_name, spread_over

console = Console(stderr=True)


class Run(NamedTuple):
    """One way of decoding one prompt: milliseconds and tokens of its beginning, then of the rest."""

    tokens: list[int]
    beginning: tuple[float, int]
    rest: tuple[float, int]


def main(  # noqa: PLR0913 - one argument for each option
    files: Annotated[list[Path], typer.Argument(help="Prompt files, JSON lines with a prompt field.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")],
    temperatures: Annotated[str, typer.Option(help="Temperatures, apart by commas; 0 is greedy.")] = "0,0.6,1",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 6,
    from_token: Annotated[int, typer.Option(min=2, help="Where the rest of a text begins.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=3, help="Tokens on each prompt.")] = 400,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Keep only the last so many tokens of a prompt.")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn.")] = False,
    out: Annotated[
        Path | None, typer.Option("--json", callback=checks.output_file, help="Write every sample here.")
    ] = None,
) -> None:
    """Print the plan's time over plain decoding's for each temperature and prompt file."""
    if from_token >= max_new_tokens:
        raise YggdrasilError(f"no token of {max_new_tokens} lies behind --from-token {from_token}; give a smaller one")
    try:
        numbers = [float(temperature) for temperature in temperatures.split(",")]
    except ValueError:
        raise YggdrasilError(f"--temperatures {temperatures} is not a list of numbers such as 0,0.6,1") from None
    asked = [SamplingParams(temperature=number, seed=0) for number in numbers]
    texts = {name: spread_over(read_prompts(file, chat=chat), limit) for name, file in sets_by_name(files).items()}
    decoder = Decoder.from_plan(plan)
    assert decoder.plan is not None
    room = decoder.assembly.engine.max_length - max_new_tokens - 1
    if room < max_prompt_tokens:
        raise YggdrasilError(
            f"the plan's texts end {room} tokens before --max-new-tokens {max_new_tokens}; give --max-prompt-tokens "
            f"{max(room, 1)}, or fewer new ones"
        )
    prompts = {
        name: [encode_prompt(decoder.tokenizer, prompt)[-max_prompt_tokens:] for prompt in chosen]
        for name, chosen in texts.items()
    }
    table = Table("temperature", "prompts", "same tokens", f"first {from_token}: over plain", "the rest: over plain")
    samples: list[dict[str, Any]] = []
    for sampling in asked:
        temperature = f"{sampling.temperature:g}"
        _both(decoder, prompts[files[0].stem][0], sampling, 0, from_token, max_new_tokens)  # warm-up
        for name, chosen in prompts.items():
            runs = []
            for number, tokens in enumerate(track(chosen, f"T={temperature}, {name}", console=console)):
                with nothing_built(f"prompt {number} of {name}"):
                    runs.append(_both(decoder, tokens, sampling, number, from_token, max_new_tokens))
            same = sum(plain.tokens == ours.tokens for plain, ours in runs)
            beginning, rest = (_over_plain([(p[part], o[part]) for p, o in runs]) for part in (1, 2))
            table.add_row(temperature, name, f"{same} of {len(runs)}", f"{beginning:.3f}", f"{rest:.3f}")
            samples.append(
                {"temperature": sampling.temperature, "prompts_file": name, "same": same, "prompts": len(runs),
                 "beginning_over_plain": beginning, "rest_over_plain": rest,
                 "runs": [{"plain": plain[1:], "ours": ours[1:]} for plain, ours in runs]}
            )  # fmt: skip
    wide_console().print(table)
    if out is not None:
        record = {
            **provenance(), **pair_settings(decoder.plan, decoder.plan.dtype), "from_token": from_token, "chat": chat,
            "max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens, "samples": samples,
        }  # fmt: skip
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    if any(found["same"] < found["prompts"] for found in samples):
        raise typer.Exit(1)


def _both(
    decoder: Decoder, tokens: list[int], sampling: SamplingParams, number: int, border: int, count: int
) -> list[Run]:
    """Plain decoding, then the plan's; which comes first alternates with ``number``."""
    order = (False, True) if number % 2 == 0 else (True, False)
    own = replace(sampling, seed=number)
    runs = {speculates: _run(decoder, tokens, own, border, count, speculates) for speculates in order}
    return [runs[False], runs[True]]


def _run(
    decoder: Decoder, tokens: list[int], sampling: SamplingParams, border: int, count: int, speculates: bool
) -> Run:
    decoder.forget()
    request = decoder.start(tokens, max_new_tokens=count, ignore_eos=True, sampling=sampling, speculation=speculates)
    times = [(perf_counter(), len(request.tokens)) for _ in request]
    begun, reached = (next(mark for mark in times if mark[1] >= least) for least in (1, border))
    return Run(list(request.tokens), _between(begun, reached), _between(reached, times[-1]))


def _between(start: tuple[float, int], end: tuple[float, int]) -> tuple[float, int]:
    return (end[0] - start[0]) * 1e3, end[1] - start[1]


def _over_plain(parts: Sequence[tuple[tuple[float, int], tuple[float, int]]]) -> float:
    """Milliseconds a token of all prompts together, ours over plain."""
    plain, ours = (sum(part[way][0] for part in parts) / max(sum(part[way][1] for part in parts), 1) for way in (0, 1))
    return ours / plain


if __name__ == "__main__":
    run_script(main, "measure_temperatures")
