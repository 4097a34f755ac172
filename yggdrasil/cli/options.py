"""Options that several commands share, by their own names."""

from typing import Annotated, Literal

import typer

Dtype = Literal["bfloat16", "float32"]
PlanOption = Annotated[str, typer.Option("--plan", help="A plan file, or a name that has a plan for this machine.")]
ForceOption = Annotated[
    bool, typer.Option("--force-machine", help="Use a plan that was calibrated on another machine.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn in the model's chat template.")
]
