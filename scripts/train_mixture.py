#!/usr/bin/env python3
"""Train a small mixture of experts, so that the experts which its rows choose can be counted (shared_experts.py).

    OMP_NUM_THREADS=1 scripts/train_mixture.py --out runs/mixture

It is a Mixtral with the attention, the embeddings and the norms of the bundled target. Every expert begins as a random
part of the units of the target's MLP. It reads the shipped text and modules of Python, cut into
blocks; one block in fifty is held out by its hash (``held_out.npy``). The loss has transformers' term for the balance
of experts.
"""

import itertools
import json
import lzma
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from pair_text import is_held_out
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from yggdrasil.artifacts import atomic_directory
from yggdrasil.checkpoints.shards import raising_os_errors
from yggdrasil.cli import checks, run_script
from yggdrasil.drafters.statistics.shipped_table import ANSWERS, TEXT

TINY = Path(__file__).parents[1] / "yggdrasil" / "assets" / "tiny"
_BLOCK = 4_096  # characters of a block of text
_LENGTH, _SEQUENCES = 256, 8  # tokens of a sequence, sequences of a step


def texts() -> Iterator[tuple[str, str]]:
    """Yield ("prose" or "code", block) for the shipped text, the shipped answers, and modules of Python."""
    answers = json.loads(lzma.decompress(ANSWERS.read_bytes()))
    prose = "\n\n".join([lzma.decompress(TEXT.read_bytes()).decode(), *answers])
    code = "".join(
        path.read_text(encoding="utf-8", errors="ignore")
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    )
    for kind, text in ("prose", prose), ("code", code[: len(prose)]):
        yield from ((kind, text[start : start + _BLOCK]) for start in range(0, len(text), _BLOCK))


def encoded(tokenizer: Tokenizer, limit: int | None = None) -> dict[str, np.ndarray]:
    """Return token ids int64 of "prose" and "code" to train on, and of "held_out", from ``limit`` blocks of each."""
    found: dict[str, list[int]] = {"prose": [], "code": [], "held_out": []}
    for kind, blocks in itertools.groupby(texts(), key=lambda pair: pair[0]):
        kept = [block for _, block in itertools.islice(blocks, limit)]
        for block, each in zip(kept, tokenizer.encode_batch_fast(kept, add_special_tokens=False), strict=True):
            found["held_out" if is_held_out(block) else kind] += each.ids
    return {kind: np.array(ids, dtype=np.int64) for kind, ids in found.items()}


def build(experts: int, chosen: int, width: int, ids: torch.Tensor) -> MixtralForCausalLM:
    """Return a mixture of ``experts`` of ``width`` units, ``chosen`` a token, made from the bundled target.

    Routers tell the rows of ``ids`` [B, S] apart.
    """
    base = LlamaForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    shared = {
        name: getattr(base.config, name)
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
        )
    }  # fmt: skip
    config = MixtralConfig(
        **shared, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=chosen,
        router_aux_loss_coef=0.02, output_router_logits=True, sliding_window=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    model.load_state_dict({k: v for k, v in base.state_dict().items() if ".mlp." not in k}, strict=False)
    inputs: list[torch.Tensor] = []  # [B * S, H] of each MLP
    for theirs in base.model.layers:
        theirs.mlp.register_forward_pre_hook(lambda _, given: inputs.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        base(ids, use_cache=False)
        for theirs, layer, rows in zip(base.model.layers, model.model.layers, inputs, strict=True):
            layer.mlp.gate.weight.copy_(router(rows, experts))
            units = len(theirs.mlp.up_proj.weight)
            for expert in range(experts):
                part = torch.randperm(units)[:width]
                gate_up = torch.cat([theirs.mlp.gate_proj.weight[part], theirs.mlp.up_proj.weight[part]])
                layer.mlp.experts.gate_up_proj[expert] = gate_up
                # The weights of the chosen experts sum to 1, so each stands for all units.
                layer.mlp.experts.down_proj[expert] = theirs.mlp.down_proj.weight[:, part] * (units / width)
    return model


def router(rows: torch.Tensor, experts: int) -> torch.Tensor:
    """Return a random router [E, H] whose logits for ``rows`` [N, H] have the mean 0 and the deviation 1.

    Without this the direction that all rows share would choose the same experts for all of them.
    """
    mean = rows.mean(0)
    weight = torch.randn(experts, rows.shape[1])
    weight -= (weight @ mean)[:, None] * mean / (mean @ mean)
    return weight / (rows @ weight.T).std(0)[:, None]


def batch(tokens: dict[str, np.ndarray], random: np.random.Generator) -> torch.Tensor:
    """Return [_SEQUENCES, _LENGTH] token ids, half of prose and half of code."""
    rows = []
    for kind in itertools.islice(itertools.cycle(("prose", "code")), _SEQUENCES):
        start = random.integers(len(tokens[kind]) - _LENGTH)
        rows.append(tokens[kind][start : start + _LENGTH])
    return torch.from_numpy(np.stack(rows))


def train(model: MixtralForCausalLM, tokens: dict[str, np.ndarray], steps: int, save: Callable[[], None]) -> None:
    """Train ``model`` in place. ``save`` is called every 40 steps and at the end."""
    added = [p for name, p in model.named_parameters() if ".mlp." in name]
    others = [p for name, p in model.named_parameters() if ".mlp." not in name]
    rates = (2e-3, 3e-4)
    optimizer = torch.optim.AdamW(
        [{"params": part, "lr": rate} for part, rate in zip((added, others), rates, strict=True)],
        betas=(0.9, 0.95), weight_decay=0.0, fused=True,
    )  # fmt: skip
    random = np.random.default_rng(0)
    for step in range(1, steps + 1):
        ids = batch(tokens, random)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(ids, labels=ids, use_cache=False)
        found.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(step / 20, 1.0, (steps - step + 1) / (steps / 2))
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}, loss {found.loss:.3f}, balance {found.aux_loss:.3f}, "
                  f"{time.process_time():.0f} s of processor time", flush=True)  # fmt: skip
        if step % 40 == 0 or step == steps:
            save()


def main(
    out: Annotated[Path, typer.Option(help="Folder for the model and held_out.npy.", callback=checks.output_folder)],
    steps: Annotated[int, typer.Option(min=1, help="Steps of 2,048 tokens.")] = 120,
    experts: Annotated[int, typer.Option(min=2)] = 32,
    chosen: Annotated[int, typer.Option(min=1, help="Experts that a token chooses.")] = 4,
    width: Annotated[int, typer.Option(min=1, max=224, help="Units of an expert.")] = 64,
    blocks: Annotated[int | None, typer.Option(min=1, help="Read only so many blocks of each text.")] = None,
) -> None:
    """Train and write a small mixture; see the module's text."""
    tokens = encoded(Tokenizer.from_file(str(TINY / "target" / "tokenizer.json")), blocks)
    print({kind: len(ids) for kind, ids in tokens.items()}, flush=True)
    model = build(experts, chosen, width, batch(tokens, np.random.default_rng(1)))

    def save() -> None:
        with atomic_directory(out) as folder, raising_os_errors():
            model.save_pretrained(folder)
            np.save(folder / "held_out.npy", tokens["held_out"])

    train(model, tokens, steps, save)


if __name__ == "__main__":
    run_script(main, "train_mixture")
