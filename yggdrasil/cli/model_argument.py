"""The argument MODEL of commands. The former options are hidden synonyms that print a deprecation note."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from yggdrasil.cli.open_decoder import say
from yggdrasil.cli.shared_options import with_parameters
from yggdrasil.errors import YggdrasilError

MODEL = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=False, help="A model (folder, .gguf file or hub id), or a plan's name or file."
    ),
]


def takes_model(
    former: str, callback: Callable[..., Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes the parameter ``former`` the argument MODEL and keeps its option as a synonym."""
    option = f"--{former}"
    synonym = Annotated[str | None, typer.Option(option, hidden=True, callback=callback)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def own(values: dict[str, Any]) -> dict[str, Any]:
            return {former: _named(values.pop("model"), values.pop(former), option), **values}

        return with_parameters(command, own, [
            Parameter("model", Parameter.KEYWORD_ONLY, default=None, annotation=MODEL),
            *(each for each in signature(command).parameters.values() if each.name != former),
            Parameter(former, Parameter.KEYWORD_ONLY, default=None, annotation=synonym),
        ])  # fmt: skip

    return decorate


def _named(model: str | None, former: str | None, option: str) -> str:
    if former is None:
        if model is None:
            raise YggdrasilError("name the model as the first argument: a folder, a .gguf file, a hub id or a plan")
        return model
    if model is not None:
        raise YggdrasilError(f"the model is named twice, by {model} and by {option} {former}; leave {option} out")
    say(f"{option} is now the first argument, and goes in the next version; write {former} without it")
    return former


def plan_of(source: str) -> str:
    """Return the plan that ``source`` names, or the plan of the model that it names.

    Raises:
        YggdrasilError: there is no such plan or model, or the model has no plan on this machine.
    """
    from yggdrasil.artifacts.plan_names import is_plan

    if is_plan(source):
        return source
    from yggdrasil.checkpoints.source import Source
    from yggdrasil.engine.plan_lookup import find_plan

    path = find_plan(Source.find(source), None, None)
    if path is None:
        raise YggdrasilError(f"{source} has no plan on this machine yet; make one with `yggdrasil calibrate {source}`")
    return str(path)
