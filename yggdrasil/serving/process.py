"""The server process: listening socket, signals and shutdown."""

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import Interrupted
from yggdrasil.serving.address import listen, url_of
from yggdrasil.serving.app import create_app
from yggdrasil.serving.client_socket import OpenProtocol
from yggdrasil.serving.server_settings import ServerSettings
from yggdrasil.serving.worker import Worker

# GIL switch interval: the decoder reacquires the GIL after every step, while the event loop reads or writes.
_LOCK_SECONDS = 1e-4
_LAST_SECONDS = 5  # after the drain limit, to send the last replies


def run_server(
    opening: Callable[[], Decoder],
    settings: ServerSettings,
    model: str,
    host: str,
    port: int,
    announce: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve HTTP requests until SIGTERM or Ctrl-C; then reject queued requests, finish the running one and shut down.

    The running request has ``settings.limits.drain_seconds`` to finish. A second signal ends the request at once, and a
    third closes connections whose client does not read. Errors of ``opening`` and ``announce`` are raised unchanged.

    Args:
        opening: builds the decoder; called in the decoder's thread.
        model: the name under which the model is served.
        host: address to listen on.
        port: port to listen on; with 0 the system chooses a free one.
        announce: called with the server's URL, in the decoder's thread, once the decoder is open.

    Raises:
        YggdrasilError: the address cannot be bound.
        Interrupted: the server was stopped before the decoder was open.
    """
    listener = listen(host, port)
    sys.setswitchinterval(_LOCK_SECONDS)
    failures: list[BaseException] = []

    def end(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    def opened() -> Decoder:
        decoder = opening()
        announce(url_of(host, listener))
        return decoder

    worker = Worker(opened, settings, end)
    limit = settings.limits.drain_seconds
    config = uvicorn.Config(
        create_app(worker, settings, model), log_level="error", access_log=False, http=OpenProtocol, ws="none",
        timeout_graceful_shutdown=round(limit) + _LAST_SECONDS, timeout_keep_alive=30,
    )  # fmt: skip
    server = _Server(config, worker, limit)
    with listener, server.handling_signals():
        server.run(sockets=[listener])
    if failures:
        raise failures[0]
    if worker.is_at_work:  # finalising Python while native code runs would abort
        atexit.register(os._exit, Interrupted.exit_code if worker.is_opening else 0)
    if worker.is_opening:
        raise Interrupted(
            "ended before the model was there; what was compiled or measured so far is kept, run the same command "
            "again to go on"
        )


class _Server(uvicorn.Server):
    """uvicorn server that shuts down in three steps, one for each signal.

    The first signal rejects queued requests and lets the running request finish within ``limit`` seconds. The second
    signal, or the end of the limit, ends the running request. The third closes connections whose client does not read.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, limit: float) -> None:
        super().__init__(config)
        self._worker, self._limit = worker, limit
        self._num_signals = 0

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Within the block, let SIGINT and SIGTERM shut the server down."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing in place of uvicorn's method, which raises the captured signals again after shutdown."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self.should_exit:
            self._worker.give_up()
            self.force_exit = self._num_signals > 2  # do not wait for clients that do not read
            return
        self.should_exit = True
        if self._worker.is_busy:
            sentence = f"the running answer has {self._limit:.0f} s to finish; a second Ctrl-C ends it"
            print(f"yggdrasil: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
        self._worker.drain()
        timer = Timer(self._limit, self._worker.give_up)
        timer.daemon = True
        timer.start()
