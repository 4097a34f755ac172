"""A server process: its socket, its signals, and its end."""

import atexit
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import Interrupted, YggdrasilError, first_line
from yggdrasil.serving.app import create_app
from yggdrasil.serving.outlet import OpenProtocol
from yggdrasil.serving.settings import ServerSettings
from yggdrasil.serving.worker import Worker

# The decoder wants Python's lock back after every step, and whoever has it meanwhile reads or writes to a client.
_LOCK_SECONDS = 1e-4


def run_server(opening: Callable[[], Decoder], settings: ServerSettings, model: str, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C: what runs then may finish within its limit, what waits is refused.

    Raises:
        YggdrasilError: the address cannot be had, or there is no decoder; Interrupted, where there was none yet.
    """
    listener = _listen(host, port)
    sys.setswitchinterval(_LOCK_SECONDS)
    failures: list[BaseException] = []

    def end(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    worker = Worker(opening, settings, end)
    config = uvicorn.Config(
        create_app(worker, settings, model), log_level="warning", access_log=False, http=OpenProtocol,
        timeout_graceful_shutdown=round(settings.limits.drain_seconds), timeout_keep_alive=30,
    )  # fmt: skip
    server = _Server(config, worker)
    with listener, suppress(KeyboardInterrupt):  # uvicorn raises its signal again when all is done
        server.run(sockets=[listener])
    if failures:
        raise failures[0]
    if worker.is_opening:
        atexit.register(os._exit, Interrupted.exit_code)  # to take Python down below its native code would abort
        raise Interrupted(
            "ended before the model was there; what was compiled or measured so far is kept, run the same command "
            "again to go on"
        )


class _Server(uvicorn.Server):
    """Refuses what waits as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._worker.drain()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise YggdrasilError(
            f"cannot listen on {host}, port {port} ({first_line(error)}); choose others with --host and --port"
        ) from error
