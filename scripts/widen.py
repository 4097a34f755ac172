"""Pad a Llama-family checkpoint to a larger shape that computes the same function.

    scripts/widen --checkpoint pair/target --size 1B --out wide/target-1B
    scripts/widen --checkpoint model.Q4_1.gguf --num-layers 16 --intermediate-size 2048 --out wide/target-deep

A pair keeps one vocabulary: give both of its models the same --size family or --vocab-size.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import SafetensorError
from widening import SIZES, read_shape, resolve_shape, widen_checkpoint

from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError


def main(  # noqa: PLR0913 - one argument for each option
    checkpoint: Annotated[str, typer.Option(help="Folder, .gguf file or hub id of the model to widen.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
    size: Annotated[str | None, typer.Option(help=f"A known shape: {', '.join(SIZES)}.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Overrides --size, as do the next six.")] = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Default: the source's group size is kept.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="A multiple of the source's.")] = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    untie: Annotated[bool, typer.Option("--untie", help="Write the output head apart from the embedding.")] = False,
    filler_token: Annotated[
        int | None, typer.Option(help="Token that new vocabulary rows repeat; default: the least likely one, probed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random new weights and of the probe.")] = 0,
) -> None:
    """Pad a Llama-family checkpoint to a larger shape that computes the same function."""
    dimensions = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    try:
        folder = Source.find(checkpoint).checkpoint(torch.bfloat16)
        shape = resolve_shape(read_shape(folder), size, dimensions)
        report = widen_checkpoint(folder, out, shape, untie=untie, filler_token=filler_token, seed=seed)
    except (YggdrasilError, OSError, SafetensorError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"Wrote {report.num_parameters / 1e6:,.1f}M parameters to {out}.")
    if report.filler_probability is not None:
        typer.echo(
            f"New vocabulary rows repeat token {report.filler_token}, whose probability never "
            f"passed {report.filler_probability:.2g} in the probe."
        )


if __name__ == "__main__":
    typer.run(main)
