#!/usr/bin/env python3
"""Write a head with its weights in bfloat16, as other engines read it, or in six bits, as Yggdrasil ships it.

    scripts/publish_head.py yggdrasil:smollm2-135m-instruct published/
    scripts/publish_head.py trained/ small/ --six-bits

The other files of the folder are copied. Only Yggdrasil reads heads in six bits.
"""

import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from yggdrasil.artifacts import atomic_directory, shown
from yggdrasil.checkpoints.shards import raising_os_errors
from yggdrasil.cli import checks, run_script
from yggdrasil.drafters.heads.tensors import in_six_bits, read_tensors
from yggdrasil.drafters.shipped_assets import resolve_shipped_head
from yggdrasil.errors import YggdrasilError

WEIGHTS = "model.safetensors"


def main(
    head: Annotated[str, typer.Argument(help="Folder of a head, or yggdrasil:NAME.")],
    out: Annotated[Path, typer.Argument(help="A new folder.", callback=checks.output_folder)],
    six_bits: Annotated[bool, typer.Option("--six-bits", help="Matrices in six bits; else bfloat16.")] = False,
) -> None:
    """Write the folder OUT as a whole."""
    folder = Path(resolve_shipped_head(head))
    if out.exists() and any(out.iterdir()):
        raise YggdrasilError(f"{shown(out)} holds something already; name a new folder")
    tensors = read_tensors(folder)
    if six_bits:
        tensors = in_six_bits(tensors)
        tensors |= {name: each.to(torch.int32) for name, each in tensors.items() if each.dtype == torch.int64}
    else:
        tensors = {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}
    with atomic_directory(out) as made, raising_os_errors():
        for file in folder.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copyfile(file, made / file.name)
        save_file({name: each.contiguous() for name, each in tensors.items()}, made / WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    run_script(main, "publish_head")
