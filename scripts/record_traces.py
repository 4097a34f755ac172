#!/usr/bin/env python3
"""Record what the policy ablation plays over: a target's greedy answers, and a draft model's trees at each token.

    scripts/record_traces.py --target model.gguf --out traces/qwen chat.jsonl code.jsonl
    scripts/record_traces.py --target model.gguf --drafter small.gguf --out traces/pair chat.jsonl
    scripts/record_traces.py --target model.gguf --drafter my/head --out traces/head chat.jsonl

Everything runs eagerly, nothing is compiled or timed. ``documents.jsonl`` holds a prompt and an answer a line, as
tokens; ``trees.safetensors`` the trees of the draft model or head, where there is one.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from yggdrasil.artifacts import write_atomic
from yggdrasil.artifacts.homes import expanded
from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.record import concatenate, record_document
from yggdrasil.calibration.row_writer import RowWriter, Task
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import run_script
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.shipped_assets import resolve_shipped_head
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.end_tokens import end_tokens
from yggdrasil.native import is_native
from yggdrasil.native.one_thread import one_thread
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.kept_tensors import open_model
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.side_by_side import SIDE_BY_SIDE
from yggdrasil.scheduling.plan import Shapes


def main(  # noqa: PLR0913
    files: Annotated[list[Path], typer.Argument(help="Prompt files, JSON lines with a prompt field.")],
    target: Annotated[str, typer.Option(help="Folder, .gguf file or hub id of the target model.")],
    out: Annotated[Path, typer.Option(help="Folder to write the traces to.")],
    drafter: Annotated[str | None, typer.Option(help="A draft model with the target's tokenizer, or a head.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of an answer at most.")] = 96,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens kept of a prompt, the last ones.")] = 192,
    widths: Annotated[str, typer.Option(help="Draft widths to record trees of.")] = "1,4",
    depth: Annotated[int, typer.Option(min=1, help="Levels of a recorded tree.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of both models.")] = 1,
) -> None:
    """Write the traces of one target."""
    loaded = _open(target, threads)
    tokenizer = load_tokenizer(target)
    tasks = [
        encode_prompt(tokenizer, prompt)[-prompt_tokens:]
        for file in files
        for prompt in read_prompts(file, limit, chat=bool(getattr(tokenizer, "chat_template", None)))
    ]
    ends = end_tokens(str(Source.find(target).folder), loaded.sizes.eos, tokenizer)
    with one_thread() if is_native() else nullcontext(), own_attention(loaded.model, SIDE_BY_SIDE):
        writer = RowWriter(loaded, ends, prompt_tokens + tokens, seed=0)
        written = [each for batch in writer.write(Task(prompt, tokens) for prompt in tasks) for each in batch]
    documents = [Document(each.task.prompt, each.tokens) for each in written if len(each.tokens) > depth + 1]
    out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(document._asdict()) + "\n" for document in documents)
    write_atomic(out / "documents.jsonl", lines.encode())
    if drafter is None:
        return
    draft_widths = tuple(sorted(int(width) for width in widths.split(",")))
    shapes = Shapes(
        max_length=prompt_tokens + tokens + 64, draft_widths=draft_widths, max_depth=depth,
        candidates=draft_widths[-1], verify_widths=(1, 2, 4, 8, 16, 32), prefill_widths=(16, 64),
    )  # fmt: skip
    name = resolve_shipped_head(drafter)
    second = load_head(expanded(name), loaded, threads) if is_head(name) else _open(name, threads)
    assembly = assemble(loaded, second, shapes, "uncompiled")
    grower = assembly.engine.drafter
    assert grower is not None
    parts = []
    for number, document in enumerate(track(documents, "recording trees")):
        parts.append(record_document(assembly, grower, document.prompt, document.answer, number))
        concatenate(parts).save(out / "trees.safetensors")


def _open(name: str, threads: int) -> LoadedModel:
    source = Source.find(name)
    weights = "full" if source.gguf is None else "file"
    return open_model(source, torch.bfloat16, torch.device("cpu"), threads, weights=weights)


if __name__ == "__main__":
    run_script(main, "record_traces")
