"""The ``yggdrasil`` command: argument parsing and printing, nothing else."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line; an expected fault is one sentence on stderr and exit code 2."""
    from yggdrasil.cli.exit_codes import run_guarded

    run_guarded(_program, "yggdrasil")


def run_script(command: Callable[..., None], name: str) -> None:
    """Run a script's one command as the command line is run."""
    import typer

    from yggdrasil.cli.exit_codes import run_guarded

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run_guarded(lambda: app, name)


def _program() -> "typer.Typer":
    # Before torch, whose native code imports it: an interruption there would be taken for a numpy that is missing.
    import numpy  # noqa: F401

    from yggdrasil.cli.app import app

    return app
