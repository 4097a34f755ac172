"""A server of this checkout, for as long as a check needs it."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from yggdrasil.errors import YggdrasilError

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 900  # steps that were never compiled are compiled first


@contextmanager
def serving(source: str, *options: str) -> Iterator[str]:
    """``yggdrasil serve source options`` on a free port; its address, once it answers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    program = [sys.executable, "-c", "from yggdrasil.cli import main; main()"]
    with running([*program, "serve", source, "--port", str(port), *options], url):
        yield url


@contextmanager
def running(command: Sequence[str], url: str) -> Iterator[None]:
    """Run the server ``command`` from the time it answers at ``url`` to the end of the block."""
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until_served(url, lambda: server.poll() is None)
        yield
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def wait_until_served(url: str, lives: Callable[[], bool] = lambda: True) -> None:
    """Wait for a server to answer, as long as it ``lives``."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except OSError:  # not listening yet, or 503 while the model is loaded
            pass
        if not lives() or time.monotonic() > deadline:
            raise YggdrasilError("the server did not start; what it said is above")
        time.sleep(0.2)
