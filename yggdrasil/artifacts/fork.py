"""Run functions in forked processes, whose memory is returned to the system when they end.

A fork shares all imported modules and loaded data. Forking a process with threads is safe enough only on Linux; on
other systems, functions run in this process.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

from yggdrasil.errors import ArtifactError, YggdrasilError

CAN_FORK = sys.platform == "linux"
_SLOWDOWN = 4  # allowed wall-clock seconds per second of processor time, for busy machines
_LOOKS, _LOOK_S = 200, 0.05  # polls of an interrupted fork, 10 s in all
_FAULTS = {kind.__name__: kind for kind in (YggdrasilError, ArtifactError)}


class Fork:
    """A forked process that runs ``work`` and exits; if ``is_silent``, the output of ``work`` is discarded.

    When this process ends for any reason, the fork and the compilers that it has started are killed. The constructor
    starts the process, and raises OSError if the system cannot.
    """

    def __init__(self, work: Callable[[], object], *, is_silent: bool = True) -> None:
        sys.stdout.flush()  # else the fork would write buffered output again
        ours, self._held = os.pipe()  # the write end closes when this process ends
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which hold no lock that a fork needs
            self.pid = os.fork()
        if not self.pid:
            os.close(self._held)
            _live(work, ours, is_silent=is_silent)
        os.close(ours)
        self._has_ended, self._status = False, 0

    def has_ended(self) -> bool:
        """Return whether the forked process has exited or was killed, without waiting."""
        if not self._has_ended:
            found, self._status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._close()
        return self._has_ended

    @property
    def has_failed(self) -> bool:
        """Whether the forked process has ended by an exception or a signal.

        The value stays False until ``has_ended`` or ``wait`` has found that the process has ended.
        """
        return self._has_ended and self._status != 0

    def wait(self) -> None:
        """Wait until the forked process exits, without a time limit; a failure of ``work`` raises nothing."""
        if not self._has_ended:
            _, self._status = os.waitpid(self.pid, 0)
            self._close()

    def end(self) -> None:
        """Kill the forked process and the processes it has started, and wait for it."""
        if not self._has_ended:
            with suppress(ProcessLookupError, PermissionError):  # it has exited, or has no process group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def interrupt(self) -> None:
        """Send SIGINT to the forked process and wait until it exits; after 10 s, kill it with SIGKILL."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)
        for _ in range(_LOOKS):
            if self.has_ended():
                return
            sleep(_LOOK_S)
        self.end()

    def _close(self) -> None:
        os.close(self._held)
        self._has_ended = True


def in_fork(work: Callable[[], str]) -> str:
    """Run ``work`` in a forked process, whose memory is freed when it ends, and return its result.

    ``work`` runs in this process if no process can be forked, and runs again in this process if it fails in the fork
    with another exception than YggdrasilError.

    Raises:
        YggdrasilError: ``work`` raised it in the forked process.
    """
    return begin_in_fork(work)()


def begin_in_fork(work: Callable[[], str]) -> Callable[[], str]:
    """Start ``work`` in a forked process, and return a function that waits for its result; call the function once.

    The function returns and raises as ``in_fork`` does. If nobody calls the function, the forked process is killed when
    this process ends. If no process can be forked, the returned function is ``work``.
    """
    if not CAN_FORK:
        return work
    read_end, write_end = os.pipe()
    try:
        fork = Fork(lambda: _answer(work, write_end), is_silent=False)
    except OSError:  # the system cannot create another process
        os.close(write_end)
        os.close(read_end)
        return work
    os.close(write_end)

    def result() -> str:
        try:
            with open(read_end, "rb") as answers:  # noqa: PTH123  (a pipe has no path)
                answer = json.loads(answers.read() or b"{}")
            fork.wait()
        except BaseException:
            fork.interrupt()
            raise
        if "fault" in answer:
            raise _FAULTS[answer["fault"]](answer["text"])
        return str(answer["text"]) if answer else work()

    return result


def ends_within(work: Callable[[], object], cpu_seconds: int, megabytes: int) -> bool:
    """Return whether ``work`` ends, even with an exception, within limits of processor time and added memory.

    ``work`` runs in a forked process, and its result is discarded. The function also returns False after 4 times
    ``cpu_seconds`` of wall-clock time, and if no process can be created. On systems other than Linux, it returns True
    without running ``work``.

    Args:
        cpu_seconds: processor time, in seconds.
        megabytes: MiB of address space in addition to what this process has mapped.
    """
    if not CAN_FORK:
        return True

    def limited() -> None:
        _limit(cpu_seconds, megabytes)
        try:
            work()
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  (the caller runs the work again, which raises it)
            return

    try:
        fork = Fork(limited)
    except OSError:  # the system cannot create another process
        return False
    try:
        deadline, pause = monotonic() + _SLOWDOWN * cpu_seconds, 0.001
        while not fork.has_ended():
            if monotonic() > deadline:
                return False
            sleep(pause)
            pause = min(2 * pause, 0.05)
    finally:
        fork.end()
    return not fork.has_failed


def _limit(cpu_seconds: int, megabytes: int) -> None:
    """Limit this process to ``cpu_seconds`` of processor time and ``megabytes`` MiB more address space."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def _answer(work: Callable[[], str], write_end: int) -> None:
    """Run ``work`` and write its result or YggdrasilError as JSON to the pipe ``write_end``."""
    answer = {}
    try:
        answer = {"text": work()}
    except YggdrasilError as error:
        kind = ArtifactError if isinstance(error, ArtifactError) else YggdrasilError
        answer = {"fault": kind.__name__, "text": str(error)}
    finally:
        os.write(write_end, json.dumps(answer).encode())
        os.close(write_end)


def _live(work: Callable[[], object], caller: int, *, is_silent: bool) -> None:
    """Run ``work`` in the fork and exit, with code 1 after an exception. Pipe ``caller`` closes with the parent."""
    code = 1
    try:
        os.setsid()  # a new process group: Ctrl-C reaches only the parent, which ends the fork
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes may ignore SIGINT
        Thread(target=_end_with, args=(caller,), daemon=True).start()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2) if is_silent else (0,):
            os.dup2(nowhere, stream)
        if is_silent:
            warnings.simplefilter("ignore")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # a fork lacks the threads of the parent's pools
        work()
        code = 0
    except BaseException:  # noqa: BLE001  (the exit code reports the failure)
        pass
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with(caller: int) -> None:
    """Wait until the pipe ``caller`` closes as the parent process ends, then kill the fork's process group."""
    os.read(caller, 1)
    os.killpg(0, signal.SIGKILL)
