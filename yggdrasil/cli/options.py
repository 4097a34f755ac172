"""Options that several commands share, and how their texts are read."""

from typing import Annotated, Literal

import typer

from yggdrasil.errors import YggdrasilError

Dtype = Literal["bfloat16", "float32"]
PlanOption = Annotated[str, typer.Option("--plan", help="A plan file, or a name that has a plan for this machine.")]
ForceOption = Annotated[
    bool, typer.Option("--force-machine", help="Use a plan that was calibrated on another machine.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn in the model's chat template.")
]


def parse_widths(text: str) -> tuple[int, ...]:
    """Numbers from a list such as ``1,2,4,8``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise YggdrasilError(f"{text!r} is not a list of numbers such as 1,2,4,8") from None
