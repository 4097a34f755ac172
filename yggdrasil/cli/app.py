"""The commands of the ``yggdrasil`` program."""

import platform
from importlib import import_module
from typing import Annotated

import typer

import yggdrasil

DECODING, GAINING, MEASURING, KEPT = "Decode", "Make it faster", "Measure", "Stored files"
# Panels of the help by command. A command is a function in the module of its name.
COMMANDS = {
    **dict.fromkeys(("chat", "generate", "serve"), DECODING),
    **dict.fromkeys(("calibrate", "search", "train"), GAINING),
    **dict.fromkeys(("bench", "report", "parity", "export"), MEASURING),
    **dict.fromkeys(("plans", "cache"), KEPT),
}


def make_app(only: str | None = None) -> typer.Typer:
    """Return the typer program with all commands.

    Args:
        only: name of one command, whose module alone is imported then; None: all.
    """
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_program)
    for name in COMMANDS if only is None else (only,):
        command = getattr(import_module(f"yggdrasil.cli.{name}"), name)
        app.command(rich_help_panel=COMMANDS[name])(command)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version  # imported late: it takes long

        beside = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        print(f"yggdrasil {yggdrasil.__version__} ({beside}, Python {platform.python_version()})")
        raise typer.Exit


def _program(
    shows_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Speculative tree decoding of language models: faster, with exactly the model's own output.

    MODEL is a checkpoint folder, a .gguf file or a hub id (owner/name), or the name of a plan from `calibrate`.
    """
