"""Pad an EAGLE-3 or Medusa head for a target that `scripts/widen` has padded: the same drafts at a wide head's costs.

python scripts/widen_head.py --head heads/mine --target wide/target-1B --out wide/head-1B
"""

from pathlib import Path
from typing import Annotated

import typer
from widening.heads import widen_head

from yggdrasil.errors import YggdrasilError


def main(
    head: Annotated[Path, typer.Option(help="Folder of an EAGLE-3 or Medusa head of the model that was widened.")],
    target: Annotated[Path, typer.Option(help="Folder that scripts/widen wrote.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
) -> None:
    """Pad an EAGLE-3 or Medusa head for a target that scripts/widen has padded."""
    try:
        count = widen_head(head, target, out)
    except (YggdrasilError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"Wrote {count / 1e6:,.1f}M parameters to {out}.")


if __name__ == "__main__":
    typer.run(main)
