"""Options that several commands share, by their own names."""

from typing import Annotated, Literal

import typer

from yggdrasil.cli import checks

Dtype = Literal["bfloat16", "float32"]
PlanOption = Annotated[str, typer.Option("--plan", help="A plan file, or a name that has a plan for this machine.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="PLAN|MODEL", help="A plan, by its name or file, or a model that has one.")
]
MaxLength = Annotated[
    int | None,
    typer.Option(min=2, help="Longest text in tokens, prompt included, if another than the plan's."),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        callback=checks.drafter,
        metavar="plan|ngram|MODULE:CLASS",
        help="Instead of the plan's drafter: ngram, n-gram look-up, or a class of your own.",
    ),
]
_GROW = "--grow-table/--no-grow-table"
_GROW_HELP = "Add n-gram counts of the answers to the model's table, in the cache, for this and later runs"
GrowOption = Annotated[bool | None, typer.Option(_GROW, help=f"{_GROW_HELP}; usual where there is a table.")]
ServerGrowOption = Annotated[bool, typer.Option(_GROW, help=f"{_GROW_HELP}; not unless asked.")]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Arithmetic of both models; the plan's if not given.")]
BackendOption = Annotated[
    Literal["native", "inductor"] | None,
    typer.Option(
        help="How steps are built: native, from the configuration; inductor, compiled by TorchInductor. Without it "
        "native where the architecture is covered."
    ),
]
DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="Where the models run; without a plan a GPU where there is one.")
]
ForceOption = Annotated[
    bool, typer.Option("--force-machine", help="Use a plan that was calibrated on another machine.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn in the model's chat template.")
]
