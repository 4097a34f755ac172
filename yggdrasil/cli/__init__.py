"""The ``yggdrasil`` command: argument parsing and printing, nothing else."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


_DECODING = ("chat", "generate", "serve")


def main() -> None:
    """Run the ``yggdrasil`` command. An expected error prints one sentence to standard error and exits with code 2."""
    if sys.argv[1:2] and sys.argv[1] in _DECODING and "--help" not in sys.argv:
        from yggdrasil.cli.late_imports import import_late

        import_late()
    from yggdrasil.cli.exit_codes import run_guarded

    run_guarded(_program, "yggdrasil")


def run_script(command: Callable[..., None], name: str) -> None:
    """Run the single command of a script, with the exit codes and one-sentence errors of ``yggdrasil``.

    Args:
        name: the script's name, before its error messages.
    """
    import typer

    from yggdrasil.cli.exit_codes import run_guarded

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run_guarded(lambda: app, name)


def _program() -> "typer.Typer":
    from yggdrasil.cli.app import COMMANDS, make_app

    app = make_app(next((name for name in sys.argv[1:2] if name in COMMANDS), None))
    # Import it before torch does: torch takes an interruption of that import for a missing numpy.
    import numpy  # noqa: F401

    return app
