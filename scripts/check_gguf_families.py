#!/usr/bin/env python3
"""Compare how this package and llama.cpp read the same GGUF file, for the architectures that both know.

    scripts/check_gguf_families.py --llama-cpp work/llama.cpp --csv docs/results/gguf.csv

For each architecture a small random model is converted by llama.cpp's own converter, and rounded to Q8_0 and K formats
by its own quantiser. This package's check of tree attention must pass each file. llama-server decodes greedily; this
package then computes the logits of the same text from the same file. A row has the number of tokens that are this
package's argmax, and the largest lead of that argmax where they are not, as a share of the range of the row's logits:
rounding makes it small, a wrong function does not. Exit code 1 if a lead is above the tolerance, and in quantised files
above twice what this package's own rounding of inputs changes. `--merge` keeps the file's rows that are not tried now.
"""

import csv
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from check_families import CPU, OTHERWISE, VOCABULARY, small_model
from llama_cpp import LlamaCpp, LlamaServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.cli import run_script
from yggdrasil.errors import YggdrasilError, one_line
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.runtime.selfcheck import check_tree_attention

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 12, 24
VARIED = 6  # tokens that a text has at least, as far as some random weights give such texts
K_FORMATS = ("q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
TOLERANCES = {"f32": 0.001, **dict.fromkeys(("q8_0", *K_FORMATS), 0.05)}  # of the range of a row's logits
ARCHITECTURES = (
    "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "smollm3", "granite", "olmo2",
    "ernie4_5", "gpt_oss", "gemma4_text", "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
    "granitemoehybrid", "falcon_h1", "nemotron_h",
)  # fmt: skip
OPTIONS = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("--no-mtp",))  # of the converter
LAYER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}  # as published Granite files name them


class Row(NamedTuple):
    """One row of the table."""

    architecture: str
    file: str  # f32, or a quantised format
    tokens: str  # "equal of all"; empty if the file was not compared
    lead: str  # the largest lead where a token differs, as a share of the range
    rounding: (
        str  # of quantised files of such sizes so far, the same of this package's argmax beside dequantised weights
    )
    note: str


# Sizes that llama.cpp's code needs: layers of every kind that a published model has, and rotated dimensions in pairs.
_LINEAR: dict[str, object] = {"layer_types": ["linear_attention", "full_attention"] * 2}
SIZES: dict[str, dict[str, object]] = {
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": True},
    "qwen3_5_text": {**_LINEAR, "head_dim": 256},
    "qwen3_5_moe_text": {**_LINEAR, "head_dim": 256},
    "qwen3_next": _LINEAR,
    "granitemoehybrid": {**_LINEAR, "shared_intermediate_size": 96},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
}  # fmt: skip
# Sizes in blocks of 256 inputs, for K formats; where there are others, the quantiser takes another format.
WIDE: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64,
    "shared_expert_intermediate_size": 256, "shared_intermediate_size": 256, "linear_value_head_dim": 64,
    "linear_key_head_dim": 64,
    "mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_head_dim": 64, "moe_shared_expert_intermediate_size": 256,
}  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the models' vocabulary: single bytes, one pair and an end."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 2], "ab", "<end>"]
    words = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[("a", "b")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


def save(name: str, folder: Path, more: dict[str, object]) -> None:
    """Save a small random model of the architecture ``name`` in ``folder``, as published checkpoints are."""
    sizes = [{**more, **each} for each in ([SIZES[name]] if name in SIZES else OTHERWISE)]
    small_model(name, sizes, VARIED)[0].save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    file = folder / "config.json"
    facts = json.loads(file.read_text())
    if name == "granitemoehybrid":
        facts["layer_types"] = [LAYER_NAMES[kind] for kind in facts["layer_types"]]
    if name == "falcon_h1":
        facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]
    file.write_text(json.dumps(facts))


def open_runner(file: Path, weights: Weights) -> ModelRunner:
    """Load a file in float32, with its blocks ("file") or dequantised ("full"), if tree attention passes its check."""
    loaded = load_model(file, torch.float32, CPU, 2, weights=weights)
    check_tree_attention(loaded)
    return ModelRunner(loaded, 128, VOCABULARY, "uncompiled", widest=32)


def read(runner: ModelRunner, text: Tensor) -> Tensor:
    """Return the logits [T, V] of a text [T]."""
    return torch.cat([found.logits for found in runner.read(text, 32)]).float()


def lead_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return how far each ``tokens`` [T] is behind the row's argmax, as a share of the range of the logits [T, V]."""
    most, least = logits.amax(-1), logits.masked_fill(logits.isinf(), 0.0).amin(-1)
    return (most - logits.gather(1, tokens[:, None])[:, 0]) / (most - least)


def rounding(file: Path, runner: ModelRunner) -> float:
    """Return the largest lead, on random texts, of the argmax of dequantised weights over that of ``runner``."""
    generator, exact = torch.Generator().manual_seed(1), open_runner(file, "full")
    texts = torch.randint(3, VOCABULARY - 2, (PROMPTS, PROMPT_TOKENS + NEW_TOKENS), generator=generator)
    return max(float(lead_of(read(exact, text), read(runner, text).argmax(-1)).max()) for text in texts)


def compare(file: Path, runner: ModelRunner, server: Path) -> tuple[int, float]:
    """Return how many tokens of llama-server are this package's argmax, and the largest lead where they are not."""
    generator, num_equal, most = torch.Generator().manual_seed(0), 0, 0.0
    command = [str(server), "--model", str(file), "--ctx-size", "256", "--threads", "2"]
    caches = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    with LlamaServer("llama.cpp", "gguf", [*command, *caches], file.with_suffix(".log")) as system:
        for _ in range(PROMPTS):
            prompt = torch.randint(3, VOCABULARY - 2, (PROMPT_TOKENS,), generator=generator).tolist()
            tokens = system.decode(prompt, NEW_TOKENS).tokens
            logits = read(runner, torch.tensor([*prompt, *tokens[:-1]]))[PROMPT_TOKENS - 1 :]
            logits[:, -1] = float("-inf")  # the end token, which the server does not generate with ignore_eos
            leads = lead_of(logits, torch.tensor(tokens))
            num_equal += int((leads == 0).sum())
            most = max(most, float(leads.max()))
    return num_equal, most


def check(name: str, kinds: Sequence[str], llama_cpp: LlamaCpp, work: Path) -> list[Row]:
    """Compare the files of one architecture in ``kinds`` of formats."""
    rows, noises = [], dict[Path, float]()
    for kind in kinds:
        folder = work / f"{name}{'-wide' if kind in K_FORMATS else ''}"
        try:
            if not folder.exists():
                save(name, folder, WIDE if kind in K_FORMATS else {})
            if kind == "f32":
                file = llama_cpp.convert(str(folder), "float32", "words", OPTIONS.get(name, ()))
            else:
                file = llama_cpp.quantised(str(folder), kind, OPTIONS.get(name, ()))
            runner = open_runner(file, "full" if kind == "f32" else "file")
            noise = 0.0 if kind == "f32" else max(noises.get(folder, 0.0), rounding(file, runner))
            noises[folder] = noise
            num_equal, lead = compare(file, runner, llama_cpp.server)
        except (YggdrasilError, subprocess.SubprocessError) as error:
            rows.append(Row(name, kind, "", "", "", one_line(error)[:200]))
            continue
        note = "" if lead <= max(TOLERANCES[kind], 2 * noise) else "differs"
        tokens, shown = f"{num_equal} of {PROMPTS * NEW_TOKENS}", f"{noise:.5f}" if noise else ""
        rows.append(Row(name, kind, tokens, f"{lead:.5f}", shown, note))
    return rows


def main(
    llama_cpp: Annotated[Path, typer.Option(help="Work folder; llama.cpp is built there once.")],
    only: Annotated[list[str] | None, typer.Argument(help="Architectures; all unless given.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"Only this one of {', '.join(TOLERANCES)}.")] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Write the table there.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Keep the file's rows of other architectures.")] = False,
) -> None:
    """Compare how this package and llama.cpp read the same GGUF file."""
    if unknown := [each for each in kind or () if each not in TOLERANCES]:
        raise YggdrasilError(f"--kind {unknown[0]!r} is not there; choose from {', '.join(TOLERANCES)}")
    transformers_logging.set_verbosity_error()
    program = LlamaCpp(llama_cpp, lambda line: typer.echo(line, err=True))
    program.build(2)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work:
        for name in only or ARCHITECTURES:
            for row in check(name, kind or list(TOLERANCES), program, Path(work)):
                typer.echo(
                    f"{row.architecture:18} {row.file:6} {row.tokens:10} {row.lead:8} {row.rounding:8} {row.note}"
                )
                rows.append(row)
    if table is not None:
        write(table, rows, merge=merge)
    raise typer.Exit(any(row.note for row in rows))


def write(table: Path, rows: Sequence[Row], *, merge: bool) -> None:
    """Write the rows, sorted; with ``merge`` keep the file's rows of other architectures."""
    kept = {(row.architecture, row.file): row for row in rows}
    if merge and table.exists():
        with table.open(newline="") as file:
            for found in (Row(**{"rounding": "", **row}) for row in csv.DictReader(file)):
                kept.setdefault((found.architecture, found.file), found)
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Row._fields, *(kept[key] for key in sorted(kept))])


if __name__ == "__main__":
    run_script(main, "check_gguf_families")
