#!/usr/bin/env python3
"""Compare what a tree costs over recurrent layers with what it costs a dense model of the same size.

    scripts/hybrid_widths.py --models dense,granite,qwen3_5,lfm2,falcon_h1

Models of about 300M random weights run passes of 1 and 8 rows behind a short text, all models in turn. A row of the
table gives the medians, their ratio T(8)/T(1), that ratio over the dense model's, and the memory that a node of a tree
takes beside the recurrent states, as a share of the states.
"""

from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import transformers
import typer
from transformers import AutoModelForCausalLM

from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.cli import run_script
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.runner import ModelRunner

TREE = (-1, 0, 0, 1, 1, 2, 3, 6)  # parents of the rows of a pass
TEXT = 64  # tokens before a pass
_SIZES = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768,
    "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2}
_DELTA = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_MANY, _FEW = ["linear_attention"] * 3 + ["full_attention"], ["conv", "conv", "full_attention", "conv"]
MODELS = {
    "dense": ("Qwen3Config", {"intermediate_size": 3072, "num_hidden_layers": 22}),
    "granite": (
        "GraniteMoeHybridConfig",
        {**_MAMBA, "num_hidden_layers": 20, "layer_types": _MANY * 5, "num_local_experts": 0,
         "shared_intermediate_size": 2048},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**_MAMBA, "num_hidden_layers": 16, "intermediate_size": 2048, "mamba_d_ssm": 2048},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {**_DELTA, "num_hidden_layers": 20, "layer_types": _MANY * 5, "intermediate_size": 2560},
    ),
    "lfm2": (
        "Lfm2Config",
        {"num_hidden_layers": 20, "layer_types": _FEW * 5, "intermediate_size": 3072,
         "block_auto_adjust_ff_dim": False},
    ),
}  # fmt: skip


def loaded_model(name: str, weights: str, threads: int) -> LoadedModel:
    """Return one of ``MODELS`` with random weights."""
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**_SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    quantise = None if weights == "full" else rounding_to(weights, model)  # type: ignore[arg-type]
    return prepare_model(model, name, threads, quantise=quantise)


def built(name: str, weights: str, threads: int) -> ModelRunner:
    runner = ModelRunner(loaded_model(name, weights, threads), 512, 32768, "native", widest=32)
    assert runner.backend == "native", f"{name} has no native steps"
    return runner


@torch.inference_mode()
def run(runner: ModelRunner, parents: tuple[int, ...]) -> float:
    """Run a pass over a tree behind the text; return its milliseconds."""
    depths: list[int] = []
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            mask[row] |= mask[parent]
    start = torch.tensor([TEXT, TEXT])
    tokens, rows = torch.randint(1, 32768, (len(parents),)), TEXT + torch.tensor(depths)
    begin = perf_counter()
    runner.call(runner.weights, runner.cache.tensors(), tokens, rows, mask, start).best_tokens()
    return (perf_counter() - begin) * 1e3


def node_share(runner: ModelRunner) -> float:
    """Bytes that a node of a tree adds over those of the recurrent states."""
    states = runner.cache.states
    if states is None:
        return 0.0
    factors = (*states.inputs, *states.decays, *states.strengths)
    kept = sum(tensor.nbytes for tensor in (*states.windows, *states.states))
    return sum(tensor.nbytes for tensor in factors) / states.num_slots / kept


def main(
    models: Annotated[
        str, typer.Option(help="names, separated by commas; the first is what others are compared with")
    ] = "dense,granite,falcon_h1,qwen3_5,lfm2",
    weights: Annotated[str, typer.Option(help="format of the weights: full, q8_0, q4_0")] = "full",
    threads: Annotated[int, typer.Option()] = 2,
    rounds: Annotated[int, typer.Option()] = 15,
) -> None:
    """Print the table."""
    print("| model | M weights | T(1) ms | T(8) ms | T(8)/T(1) | over dense | memory a node |")
    print("|---|---|---|---|---|---|---|")
    runners = {name: built(name, weights, threads) for name in models.split(",")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for turn in range(rounds + 1):  # the models alternate, since the machine's speed changes within seconds
        for name, runner in runners.items():
            both = run(runner, (-1,)), run(runner, TREE)
            if turn:  # the first passes load code and buffers
                times[name].append(both)
    first = 0.0
    for name, runner in runners.items():
        count = sum(tensor.nbytes for key, tensor in runner.loaded.tensors.items() if "embed" not in key) / 2e6
        one, eight = (median(each) for each in zip(*times[name], strict=True))
        ratio = median(wide / plain for plain, wide in times[name])
        first = first or ratio
        print(
            f"| {name} | {count:.0f} | {one:.2f} | {eight:.2f} | {ratio:.2f} | {ratio / first:.2f} "
            f"| {node_share(runner):.2%} |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    run_script(main, "hybrid_widths")
