"""Program that compiles some steps of a decoder. Its order is one line of JSON; it ends when who gave it does."""

import json
import os
import sys
import warnings
from threading import Thread


def main() -> None:
    """Open the decoder of the order and compile the steps that it names, on disk and no more."""
    order = json.loads(sys.stdin.readline())
    Thread(target=_end_with_caller, daemon=True).start()
    warnings.filterwarnings("ignore")
    from yggdrasil.engine.decoder import Decoder

    assembly = Decoder.opened(**order["opening"]).assembly
    for name, step, width in order["steps"]:
        runner = assembly.target if name == "target" else assembly.drafter
        assert runner is not None
        runner.compile(step, width)


def _end_with_caller() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
