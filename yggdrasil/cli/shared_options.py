"""Options that several commands share, and how a command is given more than its function names."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal

import typer

from yggdrasil.cli import checks

Dtype = Literal["bfloat16", "float32"]
ModelArgument = Annotated[
    str, typer.Argument(metavar="PLAN|MODEL", help="A plan, by its name or file, or a model that has one.")
]
BackendOption = Annotated[
    Literal["native", "inductor"] | None,
    typer.Option(
        help="How steps are built: native, from the configuration; inductor, compiled by TorchInductor. Without it "
        "native where the architecture is covered."
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force-machine", help="Use a plan that was calibrated on another machine.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Wrap plain prompts as a user's turn in the model's chat template.")
]


def option(name: str, kind: Any, default: Any, text: str, **more: Any) -> Parameter:
    """One option, called ``name`` and of the type ``kind``, as a parameter of a command; a switch has no opposite."""
    names = [f"--{name.replace('_', '-')}"] if kind is bool else []
    annotated: Any = Annotated
    annotation = annotated[kind, typer.Option(*more.pop("names", names), help=text, **more)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_options(command: Callable[..., None], options: Iterable[Parameter]) -> Callable[..., None]:
    """``command`` with ``options`` behind its own; it gets them as keywords."""
    own = [each for each in signature(command).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    return with_parameters(command, lambda values: values, [*own, *options])


def with_parameters(
    command: Callable[..., None], change: Callable[[dict[str, Any]], dict[str, Any]], parameters: Iterable[Parameter]
) -> Callable[..., None]:
    """``command`` as one that takes ``parameters``, whose values ``change`` turns into its own."""

    @wraps(command)
    def run(**values: Any) -> None:
        command(**change(values))

    keywords = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    del run.__wrapped__  # whoever asks for the options is to find these
    run.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in keywords} | {"return": None}
    return run


_GROW_NAMES = ["--grow-table/--no-grow-table"]
_GROW_TEXT = "Add n-gram counts of the answers to the model's table, in the cache, for this and later runs"


_OPENING = ("dtype", "drafter", "force_machine", "device", "backend", "max_length", "grow_table")


def opening(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a command's ``options`` that ``open_decoder`` takes."""
    return {name: options[name] for name in _OPENING}


def opens_decoder(command: Callable[..., None], *, is_server: bool = False) -> Callable[..., None]:
    """Give ``command`` the options of opening a decoder, which ``open_decoder`` takes by the same names."""
    kind, default, usual = (
        (bool, False, "not unless asked") if is_server else (bool | None, None, "usual where there is a table")
    )
    return with_options(command, [
        option("max_length", int | None, None,
               "Longest text in tokens, prompt included, if another than the plan's.", min=2),
        option("dtype", Dtype | None, None, "Arithmetic of both models; the plan's if not given."),
        option("drafter", str, "plan",
               "Instead of the plan's drafter: ngram, n-gram look-up, or a class of your own.",
               callback=checks.drafter, metavar="plan|ngram|MODULE:CLASS"),
        Parameter("force_machine", Parameter.KEYWORD_ONLY, default=False, annotation=ForceOption),
        option("device", Literal["cpu", "cuda"] | None, None,
               "Where the models run; without a plan a GPU where there is one."),
        Parameter("backend", Parameter.KEYWORD_ONLY, default=None, annotation=BackendOption),
        option("grow_table", kind, default, f"{_GROW_TEXT}; {usual}.", names=_GROW_NAMES),
    ])  # fmt: skip
