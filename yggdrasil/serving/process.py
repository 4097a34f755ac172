"""The server process: socket, signals and shutdown."""

import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import Interrupted, YggdrasilError, first_line
from yggdrasil.serving.app import create_app
from yggdrasil.serving.client_socket import OpenProtocol
from yggdrasil.serving.server_settings import ServerSettings
from yggdrasil.serving.worker import Worker

# The decoder wants Python's lock back after every step, and whoever has it meanwhile reads or writes to a client.
_LOCK_SECONDS = 1e-4
_LAST_SECONDS = 5  # beyond the limit, in which clients are told


def run_server(
    opening: Callable[[], Decoder],
    settings: ServerSettings,
    model: str,
    host: str,
    port: int,
    announce: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C: what runs then may finish within its limit, what waits is refused.

    ``announce`` is told the address once there is a decoder, in the decoder's thread.

    Raises:
        YggdrasilError: the address cannot be had, or there is no decoder; Interrupted, where there was none yet.
    """
    listener = _listen(host, port)
    sys.setswitchinterval(_LOCK_SECONDS)
    failures: list[BaseException] = []

    def end(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    def opened() -> Decoder:
        decoder = opening()
        announce(_address(host, listener))
        return decoder

    worker = Worker(opened, settings, end)
    limit = settings.limits.drain_seconds
    config = uvicorn.Config(
        create_app(worker, settings, model), log_level="error", access_log=False, http=OpenProtocol, ws="none",
        timeout_graceful_shutdown=round(limit) + _LAST_SECONDS, timeout_keep_alive=30,
    )  # fmt: skip
    server = _Server(config, worker, limit)
    with listener, server.told_by_signals():
        server.run(sockets=[listener])
    if failures:
        raise failures[0]
    if worker.is_at_work:  # to take Python down below its native code would abort
        atexit.register(os._exit, Interrupted.exit_code if worker.is_opening else 0)
    if worker.is_opening:
        raise Interrupted(
            "ended before the model was there; what was compiled or measured so far is kept, run the same command "
            "again to go on"
        )


class _Server(uvicorn.Server):
    """Shuts down in three steps, one for each signal.

    The first refuses queued requests and lets the running one finish within the limit. The second, or the end of the
    limit, ends the running one too. The third closes connections whose client does not read.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, limit: float) -> None:
        super().__init__(config)
        self._worker, self._limit = worker, limit
        self._told = 0  # times

    @contextmanager
    def told_by_signals(self) -> Iterator[None]:
        """Take signals while the block runs: to its end, where a second one has nothing left to interrupt."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not uvicorn's way: it raises them all again when it is done, each where it happens to be."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._told += 1
        if self.should_exit:
            self._worker.give_up()
            self.force_exit = self._told > 2  # whoever does not read what is sent is left behind
            return
        self.should_exit = True
        self._worker.drain()
        timer = Timer(self._limit, self._worker.give_up)
        timer.daemon = True
        timer.start()


def _address(host: str, listener: socket.socket) -> str:
    """Where ``listener`` is reached: the system chose its port where 0 was asked for."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise YggdrasilError(
            f"cannot listen on {host}, port {port} ({first_line(error)}); choose others with --host and --port"
        ) from error
