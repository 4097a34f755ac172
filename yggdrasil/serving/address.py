"""Opens a server's listening socket and formats its URL. This module imports neither uvicorn nor PyTorch."""

import socket

from yggdrasil.errors import YggdrasilError, first_line


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on ``host`` and ``port``; with port 0 the system chooses a free port.

    Raises:
        YggdrasilError: the address cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise YggdrasilError(
            f"cannot listen on {host}, port {port} ({first_line(error)}); choose others with --host and --port"
        ) from error


def url_of(host: str, listener: socket.socket) -> str:
    """Return the server's URL: ``host``, and the port to which the socket ``listener`` is bound."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
