"""A server that runs each command in a process of its own, forked from one that has the slow imports behind it.

It reads one JSON object a line (a ``Run``) and answers each with one (an ``Outcome``). A ``fresh`` run is forked from a
process that has imported what is other people's alone; the others also have our modules, and the native kernels.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """One command and what surrounds it."""

    program: str  # a function of programs.py
    arguments: list[str]
    folder: str  # working directory; what is printed is kept here too
    environment: dict[str, str] = field(default_factory=dict)
    stdout: str | None = None  # another file in the place of standard output, such as /dev/full
    limits: dict[str, int] = field(default_factory=dict)  # RLIMIT_* -> bytes
    closed: list[int] = field(default_factory=list)  # descriptors
    timeout: float = 60.0
    user: int | None = None  # whom the process belongs to, where root runs the suite
    kill_after: float | None = None  # SIGKILL to the whole group at that moment, as kill -9 or a crash would be
    fresh: bool = False  # our own modules too are imported by this process, and the native kernels with them
    from_nowhere: bool = False  # in a working directory that is gone


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    code: int | None  # None where a signal ended it
    signal: int | None
    hung: bool
    out: str
    err: str
    seconds: float


class Server:
    """Forked servers under this process, one for fresh runs; ``run`` asks for one run at a time."""

    def __init__(self) -> None:
        self._servers: dict[bool, _Server] = {}

    def run(self, run: Run) -> Outcome:
        if run.fresh not in self._servers:
            self._servers[run.fresh] = _Server(is_fresh=run.fresh)
        return self._servers[run.fresh].run(run)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


class _Server:
    def __init__(self, *, is_fresh: bool) -> None:
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), str(HERE.parent)]),
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, str(HERE / "forked.py"), *([] if is_fresh else ["ours"])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, run: Run) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(run)) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    _import_what_is_slow()
    for line in sys.stdin:
        print(json.dumps(asdict(_outcome(Run(**json.loads(line))))), flush=True)


def _import_what_is_slow() -> None:
    import pandas  # noqa: F401
    import torch
    import typer  # noqa: F401
    import yaml  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401
    from transformers.generation import GenerationMixin  # noqa: F401

    torch.set_num_threads(1)
    if sys.argv[1:]:
        import programs

        programs.import_ours()


def _outcome(run: Run) -> Outcome:
    files = [Path(run.folder, name) for name in ("stdout.txt", "stderr.txt")]
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(run, files)  # never returns
    status, hung, killed = _wait(child, start, run)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # whatever it started
    out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) and not hung and not killed else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return Outcome(code, ended_by, hung, out, err, time.monotonic() - start)


def _wait(child: int, start: float, run: Run) -> tuple[int, bool, bool]:
    """Its status, whether it hung, whether it was killed as asked."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, False, False
        passed = time.monotonic() - start
        hung, killed = passed > run.timeout, run.kill_after is not None and passed > run.kill_after
        if hung or killed:
            os.killpg(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1], hung, killed
        time.sleep(0.01)


def _become(run: Run, files: list[Path]) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(run.folder)
        if run.from_nowhere:
            os.chdir(Path("gone").mkdir() or "gone")
            Path("../gone").rmdir()
        os.environ.update(run.environment)
        _redirect(run, files)
        for name, size in run.limits.items():
            kind = getattr(resource, name)
            resource.setrlimit(kind, (size, size))
        if run.user is not None:
            os.setgid(run.user)
            os.setuid(run.user)
        import programs

        code = programs.run(run.program, run.arguments)
    except BaseException:  # noqa: BLE001 - a forked process must not go on as the server
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _redirect(run: Run, files: list[Path]) -> None:
    """Have the streams that a fresh process would have."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, place in ((0, os.devnull), (1, run.stdout or files[0]), (2, files[1])):
        opened = os.open(place, os.O_RDONLY if descriptor == 0 else flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    for descriptor in run.closed:
        os.close(descriptor)
    sys.stdin = None if 0 in run.closed else open(0, closefd=False)  # noqa: SIM115
    sys.stdout = None if 1 in run.closed else open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = None if 2 in run.closed else open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    serve()
