"""Options that several commands share, and functions that add options to a command."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from yggdrasil.cli import checks

Dtype = Literal["bfloat16", "float32"]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model (folder, .gguf file or hub id), or a plan's name or file.")
]
TargetArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model: folder, .gguf file or hub id.")]
BackendOption = Annotated[
    Literal["native", "inductor"] | None,
    typer.Option(
        help="How steps are built: native, from the configuration; inductor, compiled by TorchInductor. Default: "
        "native if it covers the architecture."
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        callback=checks.drafter, metavar="plan|ngram|MODULE:CLASS|HEAD",
        help="Replace the plan's drafter by ngram (n-gram lookup) or your own class. For a model that is not "
        "calibrated also the folder of a head, which then drafts where it pays.",
    ),
]  # fmt: skip
DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Device of the models. Default: the plan's; without a plan a GPU if there is one."),
]
ForceOption = Annotated[bool, typer.Option("--force-machine", help="Use a plan of another machine; it may be slower.")]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Wrap plain prompts as a user turn in the model's chat template.")
]

TrainOption = Annotated[
    Path | None,
    typer.Option(
        callback=checks.output_folder,
        help="Keep the answers, and train a draft head on them in this folder, at low priority beside use.",
    ),
]


def option(name: str, kind: Any, default: Any, text: str, **more: Any) -> Parameter:
    """Return the function parameter by which typer adds the option ``name``; a bool becomes a switch.

    Args:
        kind: type of the value.
        text: help text.
        more: further arguments of ``typer.Option``.
    """
    names = [f"--{name.replace('_', '-')}"] if kind is bool else []
    annotated: Any = Annotated
    annotation = annotated[kind, typer.Option(*more.pop("names", names), help=text, **more)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_options(command: Callable[..., None], options: Iterable[Parameter]) -> Callable[..., None]:
    """Return ``command`` with further ``options``, whose values it gets as keyword arguments (``**options``)."""
    own = [each for each in signature(command).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    keywords = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in (*own, *options)]

    @wraps(command)
    def run(**values: Any) -> None:
        command(**values)

    del run.__wrapped__  # typer must read the new signature
    run.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in keywords} | {"return": None}
    return run


_GROW_NAMES = ["--grow-table/--no-grow-table"]
_GROW_TEXT = "Add n-gram counts of the answers to the model's table, in the cache, for this and later runs"


_OPENING = ("dtype", "drafter", "force_machine", "device", "backend", "max_length", "grow_table")


def opening_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of ``open_decoder`` from ``options``, the values that ``opens_decoder`` adds."""
    return {name: options[name] for name in _OPENING}


def opens_decoder(command: Callable[..., None], *, is_server: bool = False) -> Callable[..., None]:
    """Return ``command`` with the options of opening a decoder, such as --dtype, whose values it gets as keywords.

    Args:
        is_server: whether answers are added to the n-gram table only with --grow-table, and not by default.
    """
    kind, default, usual = (
        (bool, False, "default: off") if is_server else (bool | None, None, "default: if there is a table")
    )
    return with_options(command, [
        option("max_length", int | None, None,
               "Longest text in tokens, prompt included. Default: the plan's.", min=2),
        option("dtype", Dtype | None, None, "Dtype of both models. Default: the plan's."),
        Parameter("drafter", Parameter.KEYWORD_ONLY, default="plan", annotation=DrafterOption),
        Parameter("force_machine", Parameter.KEYWORD_ONLY, default=False, annotation=ForceOption),
        Parameter("device", Parameter.KEYWORD_ONLY, default=None, annotation=DeviceOption),
        Parameter("backend", Parameter.KEYWORD_ONLY, default=None, annotation=BackendOption),
        option("grow_table", kind, default, f"{_GROW_TEXT}; {usual}.", names=_GROW_NAMES),
    ])  # fmt: skip
