#!/usr/bin/env python3
"""Train a tokenizer, a Llama target and a distilled drafter on text that you have.

Made for the pair bundled with Yggdrasil, usable for any text:

    scripts/train_pair.py --code /usr/lib/python3.11 --prose texts/ --work runs/pair --out pair/

Two stages, each resumable: ``prepare`` (tokenizer and token files) and ``joint`` (the target learns the text while the
drafter learns the target's distribution on the same batches). ``--start-from PAIR`` goes on from a pair made earlier;
``--teacher PAIR`` makes a smaller target, which begins as a part of that pair's, learns its distribution and is stored
in eight bits.
Documents are split by hash: one in fifty is held out of the tokenizer and of all training, and is what the model card
reports. On a CPU that is shared with other work, OMP_NUM_THREADS=1 is several times faster than two contended threads.

Dims: B sequences, S tokens of a sequence, V vocabulary.
"""

import io
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from pair_losses import losses_of, next_token_loss
from pair_recipe import Recipe, check_place, write_card
from pair_smaller import begin_as, round_to_eight_bits
from pair_text import TokenSampler, prepare
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from yggdrasil.artifacts import atomic_directory, write_atomic
from yggdrasil.checkpoints.shards import raising_os_errors
from yggdrasil.cli import checks, run_script
from yggdrasil.errors import Interrupted, YggdrasilError

console = Console()


# ==== models ====


def build_llama(hidden: int, layers: int, intermediate: int, recipe: Recipe) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocab_size,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=hidden // recipe.head_dim,
            num_key_value_heads=hidden // recipe.head_dim,
            head_dim=recipe.head_dim,
            max_position_embeddings=recipe.max_positions,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Optimizers:
    """Muon for the hidden matrices, AdamW for embeddings and norms, one shared schedule."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.parts = [
            torch.optim.Muon(
                matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=recipe.other_lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
        ]
        self.peak = [recipe.matrix_lr, recipe.other_lr]

    def step(self, scale: float) -> None:
        for part, peak in zip(self.parts, self.peak, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * scale
            part.step()
            part.zero_grad()

    def state_dict(self) -> list[dict]:  # type: ignore[type-arg]
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:  # type: ignore[type-arg]
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def learning_rate_scale(progress: float) -> float:
    """Warm-up over the first 1 %, constant, then linear to zero over the last 45 %."""
    return min(progress / 0.01 + 0.01, 1.0, max(1.0 - progress, 0.0) / 0.45)


# ==== stages ====


class Clock:
    """Elapsed training seconds that survive an interruption, and the progress line."""

    def __init__(self, minutes: float, elapsed: float = 0.0) -> None:
        self.total = minutes * 60
        self.elapsed = elapsed
        self.last = time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self.elapsed += now - self.last
        self.last = now
        return min(self.elapsed / self.total, 1.0)


def build_pair(recipe: Recipe, start_from: Path | None) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A new pair, or one made earlier, in float32."""
    if start_from is not None:
        target, drafter = (
            LlamaForCausalLM.from_pretrained(start_from / name, dtype=torch.float32) for name in ("target", "drafter")
        )
        return target, drafter
    torch.manual_seed(recipe.seed)
    return (
        build_llama(recipe.target_hidden, recipe.target_layers, recipe.target_intermediate, recipe),
        build_llama(recipe.drafter_hidden, recipe.drafter_layers, recipe.drafter_intermediate, recipe),
    )


def run_joint(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM],
    work: Path,
    recipe: Recipe,
    device: torch.device,
    teacher: LlamaForCausalLM | None = None,
) -> None:
    """Train ``pair`` in place, from a ``teacher`` if there is one. Interrupted, it keeps what was learned."""
    target, drafter = pair
    optimizers = [Optimizers(target, recipe), Optimizers(drafter, recipe)]
    checkpoint = work / "joint.pt"
    clock, step, seen = Clock(recipe.joint_minutes), 0, 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        target.load_state_dict(state["target"])
        drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        clock.elapsed, step, seen = state["elapsed"], state["step"], state["seen"]
        console.print(f"resuming at step {step}, {clock.elapsed / 60:.1f} of {recipe.joint_minutes} minutes")
    sampler = TokenSampler(work, recipe.prose_share, recipe.seed + step)  # resumed, it draws other windows

    def save() -> None:
        state = {
            "target": target.state_dict(),
            "drafter": drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "elapsed": clock.elapsed,
            "step": step,
            "seen": seen,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomic(checkpoint, buffer.getvalue())

    compiled = torch.compile(losses_of(target, drafter, teacher), dynamic=False)
    saved_at = clock.elapsed
    try:
        while (progress := clock.tick()) < 1.0:
            length = recipe.sequence_length if progress < 2 / 3 else recipe.long_sequence_length
            tokens = sampler.batch(recipe.tokens_per_step // length, length).to(device)
            target_loss, drafter_loss = compiled(tokens)
            (target_loss + drafter_loss).backward()
            for model, optimizer in zip((target, drafter), optimizers, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(learning_rate_scale(progress))
            step, seen = step + 1, seen + tokens.numel()
            if step % 20 == 0:
                left = (clock.total - clock.elapsed) / 60
                console.print(
                    f"joint {step} tokens {seen / 1e6:.2f}M target {target_loss.item():.3f} "
                    f"drafter {drafter_loss.item():.3f} {seen / clock.elapsed:.0f} tok/s, {left:.1f} min left"
                )
            if clock.elapsed - saved_at > 300:
                saved_at = clock.elapsed
                save()
    except KeyboardInterrupt:
        save()
        raise Interrupted("interrupted; what was learned is kept, run the same command again to go on") from None
    save()


# ==== report ====


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, work: Path, recipe: Recipe, device: torch.device
) -> dict[str, dict[str, float]]:
    """Held-out loss (nats a token) of both models and how often their first choices agree."""
    report = {}
    for kind in ("prose", "code"):
        stream = np.load(work / f"{kind}.held_out.npy").astype(np.int64)
        length = recipe.sequence_length
        rows = torch.from_numpy(stream[: len(stream) // length * length]).reshape(-1, length)[:120].to(device)
        sums = np.zeros(4)
        for tokens in rows.split(8):
            with torch.autocast(device.type, torch.bfloat16):
                p, q = (model(tokens, use_cache=False).logits.float() for model in (target, drafter))
            agree = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
            losses = [next_token_loss(logits, tokens).item() for logits in (p, q)]
            sums += np.array([losses[0], losses[1], agree, 1.0]) * len(tokens)
        means = sums[:3] / sums[3]
        report[kind] = {"target_loss": means[0], "drafter_loss": means[1], "top1_agreement": means[2]}
    return report


def main(  # noqa: PLR0913
    code: Annotated[
        Path, typer.Option(help="Folder of Python sources, read recursively.", exists=True, file_okay=False)
    ],
    prose: Annotated[Path, typer.Option(help="Folder of .txt files.", exists=True, file_okay=False)],
    work: Annotated[
        Path,
        typer.Option(
            help="Token files and checkpoints; a second run resumes from them.", callback=checks.output_folder
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="Where target/, drafter/ and the model card are written.", callback=checks.output_folder),
    ],
    data_statement: Annotated[
        Path | None, typer.Option(help="Text for the card's section on data.", callback=checks.input_file)
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(help="Go on from this pair, made earlier by this script.", exists=True, file_okay=False),
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="A pair whose target teaches a smaller one.", exists=True, file_okay=False)
    ] = None,
    joint_minutes: Annotated[float, typer.Option(min=0.0, callback=checks.finite)] = Recipe.joint_minutes,
    device: str = "cpu",
) -> None:
    """Train and write a pair; see the module's text."""
    check_place(out)
    recipe = Recipe(joint_minutes=joint_minutes)
    work.mkdir(parents=True, exist_ok=True)
    if teacher is not None and start_from is not None:
        raise YggdrasilError("--teacher and --start-from name two beginnings; give one")
    tokenizer = prepare(
        code, prose, work, vocab_size=recipe.vocab_size, max_positions=recipe.max_positions,
        start_from=start_from or teacher,
        least={"train": recipe.long_sequence_length + 1, "held_out": recipe.sequence_length},
    )  # fmt: skip
    target, drafter = (model.to(device) for model in build_pair(recipe, start_from or teacher))
    taught_by = None
    if teacher is not None:
        taught_by, target = target, build_pair(recipe, None)[0].to(device)
        begin_as(target, taught_by, TokenSampler(work, recipe.prose_share, recipe.seed).batch(4, 256).to(device))
    if joint_minutes > 0:
        run_joint((target, drafter), work, recipe, torch.device(device), taught_by)
    models = {"target": target.to(torch.bfloat16), "drafter": drafter.to(torch.bfloat16)}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    report = evaluate(target, drafter, work, recipe, torch.device(device))
    console.print(report)
    statement = data_statement.read_text() if data_statement else f"Code: {code}. Prose: {prose}."
    with atomic_directory(out) as folder, raising_os_errors():
        for name, model in models.items():
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        if teacher is not None:
            round_to_eight_bits(folder / "target")
        write_card(folder, recipe, work, report, sizes, statement)


if __name__ == "__main__":
    run_script(main, "train_pair")
