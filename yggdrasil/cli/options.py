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
GrowOption = Annotated[
    bool,
    typer.Option("--grow-table", help="Count what is said for the plan's table, now and later; kept in the cache."),
]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Arithmetic of both models; the plan's if not given.")]
ForceOption = Annotated[
    bool, typer.Option("--force-machine", help="Use a plan that was calibrated on another machine.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn in the model's chat template.")
]
