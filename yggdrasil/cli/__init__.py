"""The ``yggdrasil`` command: argument parsing and printing, nothing else."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


_DECODING = ("chat", "generate", "serve")
# Options of earlier versions that named the model, by command. They are accepted until the next version.
_FORMER = {"bench": "--plan", "calibrate": "--target", "report": "--name", "search": "--profile"}


def main() -> None:
    """Run the ``yggdrasil`` command. An expected error prints one sentence to standard error and exits with code 2."""
    sys.argv[1:] = with_model_first(sys.argv[1:])
    if sys.argv[1:2] and sys.argv[1] in _DECODING and "--help" not in sys.argv:
        from yggdrasil.cli.late_imports import import_late

        import_late()
    from yggdrasil.cli.exit_codes import run_guarded

    run_guarded(_program, "yggdrasil")


def with_model_first(arguments: list[str]) -> list[str]:
    """Return ``arguments`` with the model as the first argument where a deprecated option names it.

    A message on standard error gives the new form.
    """
    command, rest = arguments[:1], arguments[1:]
    former = _FORMER.get(command[0]) if command else None
    for place, argument in enumerate(rest):
        name, _, value = argument.partition("=")
        if name == former and (value or rest[place + 1 : place + 2]):
            taken = 1 if value else 2
            model = value or rest[place + 1]
            print(f"yggdrasil: {former} is deprecated: write `yggdrasil {command[0]} {model} ...`", file=sys.stderr)
            return [*command, model, *rest[:place], *rest[place + taken :]]
    return arguments


def run_script(command: Callable[..., None], name: str) -> None:
    """Run the single command of a script, with the exit codes and one-sentence errors of ``yggdrasil``.

    Args:
        name: the script's name, which is printed before error messages.
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
