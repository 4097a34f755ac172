#!/usr/bin/env python3
"""Decode prompts under JSON schemas with and without speculation: valid and the same? And which is faster?

    scripts/check_constraints.py --prompts c4.jsonl --limit 100 --json constraints.json

Each prompt asks for a record of one of three schemas, in turns; both ways decode it, the order alternating. The
package jsonschema judges the texts, not the library that made them. Exit code 1 if any is not valid or not the same,
or if speculation is not the faster one.
"""

import json
import statistics
import warnings
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import typer
from prompt_sets import read_prompt_sets
from rich.console import Console
from rich.progress import track

from yggdrasil.acceptance.sampling import Constraint, SamplingParams
from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.record import provenance
from yggdrasil.bench.spread import describe, spread
from yggdrasil.cli import checks, run_script
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.request import Generation
from yggdrasil.predictor.repetition import count_repeated
from yggdrasil.prompts import encode_prompt


def record_of(**properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has exactly these."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def text(longest: int) -> dict[str, Any]:
    """The schema of a short text."""
    return {"type": "string", "maxLength": longest}


SCHEMAS = {
    "person": record_of(
        name=text(24), age={"type": "integer", "minimum": 0, "maximum": 120}, city=text(24),
        is_member={"type": "boolean"},
    ),
    "order": record_of(
        order_number={"type": "integer", "minimum": 1, "maximum": 99999},
        currency={"enum": ["EUR", "USD", "GBP"]},
        items={
            "type": "array", "minItems": 1, "maxItems": 2,
            "items": record_of(product=text(20), quantity={"type": "integer", "minimum": 1, "maximum": 99}),
        },
    ),
    "call": record_of(
        function={"enum": ["search_documents", "send_message", "create_event"]},
        arguments=record_of(subject=text(30), priority={"enum": ["low", "normal", "high"]}),
    ),
}  # fmt: skip


def main(
    prompts: Annotated[list[Path], typer.Option(help="JSON lines with a prompt field; repeat it for several sets.")],
    plan: Annotated[str, typer.Option(help="A plan file or name.")] = "tiny",
    limit: Annotated[int, typer.Option(help="Prompts of each set.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens on each at most.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(help="Keep only the last so many tokens of a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: the best token always; else drawn by a seed.")] = 0.0,
    force_machine: Annotated[bool, typer.Option("--force-machine", help="Use another machine's plan.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=checks.output_file, help="Write every sample and the summary here."),
    ] = None,
) -> None:
    """Print how many texts are valid and equal, and the ratio of times."""
    warnings.simplefilter("ignore", UserWarning)  # the plan was calibrated at temperature 0
    decoder = Decoder.from_plan(plan, force_machine=force_machine)
    samples: list[dict[str, Any]] = []
    for i, prompt in enumerate(track(read_prompt_sets(prompts, limit), "prompts", console=Console(stderr=True))):
        name = list(SCHEMAS)[i % len(SCHEMAS)]
        sampling = SamplingParams(
            constraint=Constraint("json_schema", json.dumps(SCHEMAS[name])), temperature=temperature, seed=i
        )
        start = encode_prompt(decoder.tokenizer, prompt)[-max_prompt_tokens:]
        tokens = [*start, *decoder.tokenizer(f"\n\nThe {name} as JSON:\n")["input_ids"]]
        runs: dict[bool, Generation] = {}
        for speculation in (i % 2 == 0, i % 2 == 1):
            if i < len(SCHEMAS):  # uncounted: it loads the steps
                decoder.generate(tokens, max_new_tokens=max_new_tokens, speculation=speculation, sampling=sampling)
            runs[speculation] = decoder.generate(
                tokens, max_new_tokens=max_new_tokens, speculation=speculation, sampling=sampling
            )
        samples.append(
            {
                "id": prompt.id,
                "schema": name,
                "text": runs[True].text,
                "finish_reason": runs[True].finish_reason,
                "is_valid": is_valid(runs[True].text, SCHEMAS[name]),
                "is_same": runs[True].tokens == runs[False].tokens,
                "num_tokens": len(runs[True].tokens),
                "foretold": count_repeated(tokens, runs[True].tokens),
                "plain": runs[False].metrics.as_dict(),
                "tree": runs[True].metrics.as_dict(),
            }
        )
    summary = summarise(samples)
    for key, value in summary.items():
        print(f"{key}: {describe(value) if isinstance(value, dict) else value}")
    if out is not None:
        record = {
            **provenance(), "plan": plan, "prompts_files": [path.name for path in prompts], "temperature": temperature,
            "max_new_tokens": max_new_tokens, "schemas": SCHEMAS, "summary": summary, "samples": samples,
        }  # fmt: skip
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    is_faster = summary["speedup"]["median"] > 1
    raise typer.Exit(0 if summary["valid"] == summary["same"] == len(samples) and is_faster else 1)


def is_valid(found: str, schema: dict[str, Any]) -> bool:
    """Whether ``found`` is JSON of the schema."""
    try:
        jsonschema.validate(json.loads(found), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts; medians, and quartiles of the ratio of times, prompt by prompt."""
    return {
        "prompts": len(samples),
        "valid": sum(sample["is_valid"] for sample in samples),
        "same": sum(sample["is_same"] for sample in samples),
        "tokens": statistics.mean(sample["num_tokens"] for sample in samples),
        "aal": statistics.mean(sample["tree"]["aal"] for sample in samples),
        "plain_tpot_ms": statistics.median(sample["plain"]["tpot_ms"] for sample in samples),
        "tpot_ms": statistics.median(sample["tree"]["tpot_ms"] for sample in samples),
        "repeats": sum(sample["foretold"] for sample in samples) / sum(sample["num_tokens"] for sample in samples),
        "speedup": spread([sample["plain"]["tpot_ms"] / sample["tree"]["tpot_ms"] for sample in samples]),
    }


if __name__ == "__main__":
    run_script(main, "check_constraints")
