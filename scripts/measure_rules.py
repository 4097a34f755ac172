#!/usr/bin/env python3
"""Measure AAL and milliseconds a token of every acceptance rule and exactness mode, prompt by prompt, in turns.

    scripts/measure_rules.py --prompts prompts.jsonl --limit 12 --max-new-tokens 64 --json rules.json

Run it on an idle machine. Strict needs the tolerance that ``yggdrasil parity`` measures; it is left out without one.
"""

import json
import platform
import statistics
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import OFF, Speculation
from yggdrasil.artifacts import current_machine, write_atomic
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.prompts import Prompt, read_prompts
from yggdrasil.tree.objective import TreeShape

WAYS = {
    "off": OFF,
    "match": Speculation(),
    "match, k-ary 2,1,1": Speculation(expansion=(2, 1, 1)),
    "leviathan": Speculation(rule="leviathan"),
    "specinfer": Speculation(rule="specinfer"),
    "sequoia": Speculation(rule="sequoia"),
    "typical": Speculation(rule="typical"),
    "relaxed": Speculation(rule="relaxed"),
    "match, strict": Speculation(exactness="strict"),
    "match, fixed-width": Speculation(exactness="fixed-width"),
    "off, fixed-width": Speculation(rule="off", exactness="fixed-width"),
}


def main(  # noqa: PLR0913  (a command's options)
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt field.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")] = "demo",
    limit: Annotated[int, typer.Option(help="Prompts.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 256,
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
    fixed_shape: Annotated[
        bool, typer.Option("--fixed-shape", help="A tree of width 2 and depth 3 at every step, not the plan's choice.")
    ] = False,
    force_machine: Annotated[bool, typer.Option("--force-machine", help="Use another machine's plan.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write every sample and the summary here.")] = None,
) -> None:
    """Print one row a rule and temperature."""
    warnings.simplefilter("ignore", UserWarning)
    decoder = Decoder.from_plan(plan, force_machine=force_machine)
    if fixed_shape:
        decoder.policy = FixedPolicy(TreeShape(2, 3, 8))
    ways = {name: way for name, way in WAYS.items() if way.exactness != "strict" or decoder.tolerance is not None}
    requests = read_prompts(prompts, limit)
    samples: list[dict[str, Any]] = []
    for temperature in (float(part) for part in temperatures.split(",")):
        run(decoder, requests[:1], ways, temperature, max_new_tokens, max_prompt_tokens)  # loads the steps
        samples += run(decoder, requests, ways, temperature, max_new_tokens, max_prompt_tokens)
    summary = summarise(samples)
    table = Table("rule", "temperature", "lossless", "AAL", "ms a token", "of plain")
    for row in summary:
        table.add_row(
            row["way"], f"{row['temperature']:g}", "yes" if row["lossless"] else "NO", f"{row['aal']:.2f}",
            f"{row['tpot_ms']:.3f}", f"{row['of_plain']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if out is not None:
        record = {
            "plan": plan, "machine": current_machine().describe(), "python": platform.python_version(),
            "prompts_file": prompts.name, "max_new_tokens": max_new_tokens, "fixed_shape": fixed_shape,
            "tolerance": decoder.tolerance, "summary": summary, "samples": samples,
        }  # fmt: skip
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())


def run(
    decoder: Decoder,
    requests: list[Prompt],
    ways: dict[str, Speculation],
    temperature: float,
    max_new_tokens: int,
    max_prompt_tokens: int,
) -> list[dict[str, Any]]:
    """One sample a prompt and way, the order turning from prompt to prompt."""
    samples = []
    names = list(ways)
    for i, prompt in enumerate(
        track(requests, console=Console(stderr=True), description=f"temperature {temperature:g}")
    ):
        tokens = list(decoder.tokenizer(prompt.prompt)["input_ids"])[-max_prompt_tokens:]
        for way in names[i % len(names) :] + names[: i % len(names)]:
            result = decoder.generate(
                tokens, max_new_tokens=max_new_tokens, ignore_eos=True, speculation=ways[way],
                sampling=SamplingParams(temperature=temperature, seed=i),
            )  # fmt: skip
            metrics = result.metrics.as_dict()
            samples.append({"id": prompt.id, "way": way, "temperature": temperature, "metrics": metrics})
    return samples


def summarise(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over prompts; the ratio to plain decoding is taken prompt by prompt."""
    plain = {(s["id"], s["temperature"]): s["metrics"]["tpot_ms"] for s in samples if s["way"] == "off"}
    rows = []
    for way, temperature in dict.fromkeys((s["way"], s["temperature"]) for s in samples):
        of_way = [s for s in samples if (s["way"], s["temperature"]) == (way, temperature)]
        ratios = [s["metrics"]["tpot_ms"] / plain[s["id"], temperature] for s in of_way]
        rows.append(
            {
                "way": way,
                "temperature": temperature,
                "lossless": of_way[0]["metrics"]["decoding"]["lossless"],
                "aal": statistics.mean(s["metrics"]["aal"] for s in of_way),
                "tpot_ms": statistics.median(s["metrics"]["tpot_ms"] for s in of_way),
                "of_plain": statistics.median(ratios),
            }
        )
    return sorted(rows, key=lambda row: (row["temperature"], list(WAYS).index(row["way"])))


if __name__ == "__main__":
    typer.run(main)
