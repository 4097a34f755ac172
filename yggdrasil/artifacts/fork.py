"""Work in processes forked from this one: what it takes of memory goes with them.

A fork has everything that was imported and loaded already. Only Linux forks a process with threads safely enough;
elsewhere work is done here.
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
_SLOWDOWN = 4  # of a busy machine: wall-clock seconds for a second of processor time
_LOOKS, _LOOK_S = 200, 0.05  # at a fork that was interrupted: ten seconds
_FAULTS = {kind.__name__: kind for kind in (YggdrasilError, ArtifactError)}


class Fork:
    """A process that does one piece of work and ends; ``is_silent`` keeps from the terminal whatever it would say.

    It ends with this process too, however that went, and takes the compiler that it may be waiting for with it.
    """

    def __init__(self, work: Callable[[], object], *, is_silent: bool = True) -> None:
        sys.stdout.flush()  # else a fork writes it too
        ours, self._held = os.pipe()  # the other end closes with this process
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads here: they hold nothing that a fork needs
            self.pid = os.fork()
        if not self.pid:
            os.close(self._held)
            _live(work, ours, is_silent=is_silent)
        os.close(ours)
        self._has_ended, self._status = False, 0

    def has_ended(self) -> bool:
        """Whether the work is done, or given up."""
        if not self._has_ended:
            found, self._status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._close()
        return self._has_ended

    @property
    def has_given_up(self) -> bool:
        """Whether it has ended, and not well."""
        return self._has_ended and self._status != 0

    def wait(self) -> None:
        """Until the work is done, or given up."""
        if not self._has_ended:
            _, self._status = os.waitpid(self.pid, 0)
            self._close()

    def end(self) -> None:
        """Now."""
        if not self._has_ended:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or has no group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def interrupt(self) -> None:
        """As Ctrl-C would: it has a while to put its things in order."""
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
    """What ``work`` returns, done in a fork, whose memory goes with it; done here where the fork comes to nothing.

    Raises:
        YggdrasilError: whatever ``work`` raises of that kind; anything else it raises when it is done here.
    """
    if not CAN_FORK:
        return work()
    told, tell = os.pipe()
    try:
        fork = Fork(lambda: _answer(work, tell), is_silent=False)
    except OSError:  # no memory or no number left for another process
        os.close(tell)
        os.close(told)
        return work()
    os.close(tell)
    try:
        with open(told, "rb") as answers:  # noqa: PTH123  (a pipe has no path)
            answer = json.loads(answers.read() or b"{}")
        fork.wait()
    except BaseException:
        fork.interrupt()
        raise
    if "fault" in answer:
        raise _FAULTS[answer["fault"]](answer["text"])
    return str(answer["text"]) if answer else work()


def ends_within(work: Callable[[], object], cpu_seconds: int, megabytes: int) -> bool:
    """Whether ``work`` ends, be it with an error, within so much processor time and so much more memory.

    It is done in a fork, and its result is lost: the caller does it again. True where a process cannot be forked.
    """
    if not CAN_FORK:
        return True

    def limited() -> None:
        _limit(cpu_seconds, megabytes)
        try:
            work()
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  (the caller meets it again)
            return

    try:
        fork = Fork(limited)
    except OSError:  # no memory or no number left for another process
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
    return not fork.has_given_up


def _limit(cpu_seconds: int, megabytes: int) -> None:
    """Have the system end this process at these limits."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def _answer(work: Callable[[], str], tell: int) -> None:
    answer = {}
    try:
        answer = {"text": work()}
    except YggdrasilError as error:
        kind = ArtifactError if isinstance(error, ArtifactError) else YggdrasilError
        answer = {"fault": kind.__name__, "text": str(error)}
    finally:
        os.write(tell, json.dumps(answer).encode())
        os.close(tell)


def _live(work: Callable[[], object], caller: int, *, is_silent: bool) -> None:
    """The life of a fork. ``caller`` is a pipe that ends when the process does that asked for it."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the caller, who ends it
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background may not listen to it
        Thread(target=_end_with, args=(caller,), daemon=True).start()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2) if is_silent else (0,):
            os.dup2(nowhere, stream)
        if is_silent:
            warnings.simplefilter("ignore")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # the threads of the caller's pools are not here
        work()
        code = 0
    except BaseException:  # noqa: BLE001  (whoever does it then says what is wrong)
        pass
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with(caller: int) -> None:
    os.read(caller, 1)
    os.killpg(0, signal.SIGKILL)
