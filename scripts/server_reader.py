"""A client that only notes when bytes come.

It reads a chat completion's body from each line of standard input, asks the server at the port given for it, and writes
a line with the seconds until the first text, those until the end, and the number of tokens.
"""

import json
import re
import socket
import sys
from time import perf_counter

END = b"0\r\n\r\n"  # of a chunked body
TEXT, FIGURES, TOKENS = map(re.compile, (rb'"content":"[^"]', rb'"timings":', rb'"predicted_n":(\d+)'))


def main(port: int) -> None:
    """Ask until there are no more lines, over one connection."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for line in sys.stdin:
            print(json.dumps(_ask(connection, line.strip().encode())), flush=True)


def _ask(connection: socket.socket, body: bytes) -> tuple[float, float, int]:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    parts: list[tuple[float, bytes]] = []
    last = b""
    start = perf_counter()
    connection.sendall(request)
    while not last.endswith(END):
        data = connection.recv(1 << 16)
        parts.append((perf_counter() - start, data))
        assert data, "the server closed the connection"
        last = last[-len(END) :] + data
    whole = b"".join(data for _, data in parts)
    tokens = TOKENS.search(whole)
    assert tokens is not None, whole[:1000].decode(errors="replace")
    return _time_of(TEXT, whole, parts), _time_of(FIGURES, whole, parts), int(tokens[1])


def _time_of(pattern: re.Pattern[bytes], whole: bytes, parts: list[tuple[float, bytes]]) -> float:
    """When the place where the pattern is found had come."""
    found = pattern.search(whole)
    assert found is not None, f"no {pattern.pattern!r} came"
    size = 0
    for seconds, data in parts:
        size += len(data)
        if size >= found.end():
            return seconds
    raise AssertionError("unreachable: the pattern was found in what came")


if __name__ == "__main__":
    main(int(sys.argv[1]))
