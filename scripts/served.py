"""A server of this checkout, for as long as a check needs it."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from yggdrasil.errors import YggdrasilError

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 900  # steps that were never compiled are compiled first


@contextmanager
def serving(source: str, *options: str) -> Iterator[str]:
    """``yggdrasil serve source options`` on a free port; its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    program = [sys.executable, "-c", "from yggdrasil.cli import main; main()"]
    server = subprocess.Popen([*program, "serve", source, "--port", str(port), *options], cwd=ROOT)
    try:
        _wait(url, server)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except OSError:  # not listening yet, or 503 while the model is loaded
            pass
        if server.poll() is not None or time.monotonic() > deadline:
            raise YggdrasilError("the server did not start; what it said is above")
        time.sleep(0.2)
