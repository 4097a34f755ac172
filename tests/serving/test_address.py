"""A server says where it is reached."""

import socket
import sys

import pytest

from yggdrasil.serving import process
from yggdrasil.serving.server_settings import ServerSettings


def can_listen(host):
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        pytest.param("::1", "[::1]", marks=pytest.mark.skipif(not can_listen("::1"), reason="there is no IPv6 here")),
    ],
)
def test_the_address_has_the_port_that_is_listened_on(monkeypatch, host, shown):
    """Also a port that the system chose; it is printed once there is a decoder."""
    lines, ports = [], []

    def run(server, sockets):
        ports.extend(listener.getsockname()[1] for listener in sockets)
        server._worker._opening()

    monkeypatch.setattr(process._Server, "run", run)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    process.run_server(lambda: lines.append("opened"), ServerSettings(), "tiny", host, 0, lines.append)

    assert ports[0] > 0
    assert lines == ["opened", f"http://{shown}:{ports[0]}"]
