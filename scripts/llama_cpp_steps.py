"""A llama.cpp process that runs single passes on request: the other side of a comparison of steps."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from yggdrasil.errors import YggdrasilError


class LlamaSteps:
    """One model in a process of its own, its caches in llama.cpp's usual format; ``close`` ends it."""

    def __init__(self, program: Path, model: Path, threads: int, longest: int) -> None:
        """``longest``: tokens that its cache holds. Returns when the model is loaded."""
        self._name = model.name
        command = [str(program), "serve", str(model), str(threads), str(longest)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def time(self, context: int, width: int) -> float:
        """Milliseconds of one pass; the pass before it is not counted. Behind nothing it reads a prompt."""
        wanted, warm = (width, 1) if context else (1, 0)
        return float(self._ask(f"time {context} {width} {wanted} {warm} 1")[0])

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` likeliest tokens behind ``prompt``, one by one."""
        return [int(part) for part in self._ask(f"text {count} {' '.join(map(str, prompt))}")]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: str) -> list[str]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise YggdrasilError(f"llama.cpp ended on {self._name} with {self._process.wait()}; its reason is above")
        return line.split()
