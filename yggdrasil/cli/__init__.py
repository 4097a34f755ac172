"""The ``yggdrasil`` command: argument parsing and printing, nothing else."""

import sys
from collections.abc import Callable


def main() -> None:
    """Run the command line; an expected fault is one sentence on stderr and exit code 2."""
    from yggdrasil.cli.app import app

    _run(app, "yggdrasil")


def run_script(command: Callable[..., None], name: str) -> None:
    """Run a script's one command as the command line is run."""
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    _run(app, name)


def _run(app: Callable[[], object], name: str) -> None:
    from yggdrasil.errors import YggdrasilError

    try:
        app()
    except YggdrasilError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(
            f"\n{name}: interrupted; nothing half-written was left, run the same command again to go on",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
