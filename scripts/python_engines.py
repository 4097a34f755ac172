"""Engines of other projects that are Python packages, as systems to compare with: OpenVINO GenAI and ik_llama.cpp.

Each runs in an environment of its own in a work folder, because their dependencies are not ours, and reads the GGUF
file as it is. If an engine does not read the file, it is left out, and its message is printed.
"""

import json
import subprocess
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from bench_systems import Continuation

from yggdrasil.errors import YggdrasilError

WORKER = Path(__file__).with_name("engine_worker.py")


class PythonEngine(NamedTuple):
    """An engine: what it is called here, its argument of engine_worker.py, and its package."""

    name: str
    worker: str
    package: str


ENGINES = (
    PythonEngine("OpenVINO GenAI, plain", "openvino", "openvino-genai==2026.4.1.0"),
    PythonEngine("OpenVINO GenAI, prompt look-up", "openvino-lookup", "openvino-genai==2026.4.1.0"),
    PythonEngine("ik_llama.cpp, plain", "ik-llama", "ik-llama-cpp-python==0.1.5"),
)


def python_engines(
    work: Path,
    file: Path,
    threads: int,
    context_length: int,
    is_wanted: Callable[[str], bool],
    running: ExitStack,
    say: Callable[[str], None],
) -> Iterator["EngineProcess"]:
    """Yield the engines that read ``file``, a GGUF file; each runs until ``running`` is closed. Others are named."""
    for engine in ENGINES:
        if is_wanted(engine.name):
            try:
                python = install(work, engine.package, say)
                command = [str(python), str(WORKER), engine.worker, str(file), str(threads), str(context_length)]
                process = EngineProcess(engine, command, work / f"{engine.worker}.log")
                yield running.enter_context(process)
            except YggdrasilError as error:
                say(f"left out: {error}")


def install(work: Path, package: str, say: Callable[[str], None]) -> Path:
    """Return the Python of an environment with ``package`` (NAME==VERSION), made in ``work`` once.

    Raises:
        YggdrasilError: pip failed; its last line is in the message.
    """
    folder = work.resolve() / package.replace("==", "-")
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        say(f"installing {package} in {folder}")
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise YggdrasilError(f"{package} cannot be installed: {_last_line(done.stderr)}")
        made.touch()
    return python


class EngineProcess:
    """A process that continues prompts with an engine; ``close`` ends it."""

    def __init__(self, engine: PythonEngine, command: Sequence[str], log: Path) -> None:
        """Start the process and wait until it has loaded the model.

        Raises:
            YggdrasilError: it cannot; the engine's message is in the sentence.
        """
        self.name, self.family = engine.name, engine.name.split(",")[0]
        self.is_plain = engine.name.endswith(", plain")
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            answer = self._read()
            if "error" in answer:
                raise YggdrasilError(f"{self.name}: {answer['error']}")
            self.version = answer["version"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Continuation:
        """Continue ``prompt`` by exactly ``max_new_tokens`` tokens, greedily.

        Raises:
            YggdrasilError: the engine stopped, or gave another number of tokens.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt": list(prompt), "count": max_new_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what reading says is the reason
        answer = self._read()
        tokens, decoded = answer["tokens"], max_new_tokens - 1
        if len(tokens) != max_new_tokens:
            raise YggdrasilError(f"{self.name} gave {len(tokens)} of {max_new_tokens} tokens")
        passes = decoded if self.is_plain else 0  # with drafts it is not known
        return Continuation(tokens, answer["first_ms"], answer["rest_ms"] / max(decoded, 1), decoded, passes)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise YggdrasilError(f"{self.name} stopped: {_last_line(self._log.read_text(errors='replace'))}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "without output")[:300]
