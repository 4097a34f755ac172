"""The ``yggdrasil`` command: argument parsing and printing, nothing else."""

import sys


def main() -> None:
    """Run the command line; an expected fault is one sentence on stderr and exit code 2."""
    from yggdrasil.cli.app import app
    from yggdrasil.errors import YggdrasilError

    try:
        app()
    except YggdrasilError as error:
        print(f"yggdrasil: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(
            "\nyggdrasil: interrupted; nothing half-written was left, run the same command again to go on",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
