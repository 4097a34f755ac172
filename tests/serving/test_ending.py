"""A server process that gets a signal: running requests finish within a limit, waiting ones are refused."""

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn
from bundled_server import wait_until

from yggdrasil.serving.process import _Server

# The bundled pair, held in an iteration until it is released or gives up, so that a signal arrives during an answer.
PROGRAM = """
import os, sys
from threading import Event, Thread
sys.path[:0] = {paths!r}
from bundled_server import open_pair
from yggdrasil.serving.process import run_server
from yggdrasil.serving.server_settings import Limits, ServerSettings
from yggdrasil.serving.worker import Worker

goes_on, give_up = Event(), Worker.give_up
Worker.give_up = lambda worker: give_up(worker) or goes_on.set()
Thread(target=lambda: os.read(0, 1) and goes_on.set(), daemon=True).start()

def opening():
    decoder = open_pair()
    target = decoder.assembly.engine.target
    verify = target.verify
    target.verify = lambda width: goes_on.wait() and verify(width)
    return decoder

settings = ServerSettings(limits=Limits(drain_seconds={limit}))
run_server(opening, settings, "tiny", "127.0.0.1", 0, lambda url: print(url, flush=True))
"""
CHAT = [{"role": "user", "content": "Count"}]


def start(limit):
    folder = Path(__file__).parent
    process, url = begun(PROGRAM.format(paths=[str(folder), str(folder.parents[1])], limit=limit))
    client = httpx2.Client(base_url=url, timeout=60)
    wait_until(lambda: is_up(client))
    return process, client


def begun(program):
    """A process, and the address that it says: the system chose its port, so no other has it."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, process.stdout.readline().strip()


def let_go(process):
    process.stdin.write("x")
    process.stdin.flush()


def is_up(client):
    return health(client) == 200


UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"


def send_websocket_and_bad_request(client):
    """Both are refused, and leave nothing in the log."""
    for request in (f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\n{UPGRADE}\r\n", "no HTTP at all\r\n\r\n"):
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
            connection.sendall(request.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    ("tokens", "signals"),
    [(60, 1), pytest.param(400, 2, marks=pytest.mark.slow)],
    ids=["in time", "second signal"],
)
def test_sigterm_lets_an_answer_end_within_the_limit(tokens, signals):
    """Where it may not, the stream ends as one that failed, and the log has nothing to tell."""
    process, client = start(30)
    send_websocket_and_bad_request(client)
    waiting = {}

    def wait():
        reply = client.post("/v1/chat/completions", json={"messages": CHAT})
        waiting.update(status=reply.status_code, error=reply.json()["error"])

    body = {"messages": CHAT, "stream": True, "max_tokens": tokens}
    with closing(client), client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        second = threading.Thread(target=wait)
        second.start()
        wait_until(lambda: "yggdrasil_queue_depth 1.0" in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        second.join(60)
        assert waiting["status"] == 503
        assert "shutting down" in waiting["error"]["message"]
        if signals == 2:
            process.send_signal(signal.SIGINT)
        if tokens == 60:
            let_go(process)
        data = [line[6:] for line in lines if line.startswith("data: ")]
        last = json.loads(data[-2])
        assert data[-1] == "[DONE]"
        if tokens == 60:
            assert last["choices"][0]["finish_reason"] == "length"
            assert last["timings"]["predicted_n"] == 60
        else:
            assert "shutting down" in last["error"]["message"]
    assert process.wait(60) == 0
    assert process.stderr.read() == "yggdrasil: the running answer has 30 s to finish; a second Ctrl-C ends it\n"


@pytest.mark.slow
def test_all_answers_that_a_request_has_begun_with_may_end():
    process, client = start(30)
    found = {}

    def ask():
        found["reply"] = client.post("/v1/chat/completions", json={"messages": CHAT, "n": 3, "max_tokens": 60})

    with closing(client):
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: "yggdrasil_busy 1.0" in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_up(client))
        assert asking.is_alive()
        let_go(process)
        asking.join(60)

    assert [choice["finish_reason"] for choice in found["reply"].json()["choices"]] == ["length"] * 3
    assert process.wait(60) == 0


@pytest.mark.slow
def test_two_signals_at_once_end_an_idle_server_in_silence():
    process, client = start(30)
    client.close()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # not the same again: of two that wait to be delivered, one would be

    assert process.wait(60) == 0
    assert process.stderr.read() == ""


def test_a_third_signal_waits_for_no_client(capsys):
    """As one that does not read what it is sent. The first says how long an answer has."""
    calls = []
    worker = SimpleNamespace(is_busy=True, drain=lambda: calls.append("drain"), give_up=lambda: calls.append("give up"))
    server = _Server(uvicorn.Config("none"), worker, 60.0)
    states = []
    for _ in range(3):
        server.handle_exit(signal.SIGINT, None)
        states.append((server.should_exit, server.force_exit))

    assert calls == ["drain", "give up", "give up"]
    assert states == [(True, False), (True, False), (True, True)]
    said = "yggdrasil: the running answer has 60 s to finish; a second Ctrl-C ends it\n"
    assert capsys.readouterr().err == said


def test_what_runs_is_given_up_when_the_time_is_over():
    given_up = threading.Event()
    worker = SimpleNamespace(is_busy=False, drain=lambda: None, give_up=given_up.set)
    _Server(uvicorn.Config("none"), worker, 0.0).handle_exit(signal.SIGTERM, None)

    assert given_up.wait(10)


# Native code is at work in the thread that opens, as while stages are measured.
OPENING = """
import sys
sys.path[:0] = {paths!r}
from yggdrasil.cli import run_script
import torch
from yggdrasil.serving import process
from yggdrasil.serving.server_settings import ServerSettings

class Server(process._Server):
    async def startup(self, sockets):
        await super().startup(sockets)
        print("http://127.0.0.1:%d" % sockets[0].getsockname()[1], flush=True)

process._Server = Server

def opening():
    a = torch.randn(400, 400)
    while True:
        a = (a @ a).clamp(-1, 1)

def serve():
    process.run_server(opening, ServerSettings(), "tiny", "127.0.0.1", 0)

run_script(serve, "serve")
"""


def test_sigterm_before_the_model_is_there_ends_with_a_sentence():
    process, url = begun(OPENING.format(paths=[str(Path(__file__).parents[2])]))
    with httpx2.Client(base_url=url, timeout=60) as client:
        wait_until(lambda: is_listening(client))
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 130
    assert process.stderr.read().split(":", 1)[1].startswith(" ended before the model was there; what was compiled")


def is_listening(client):
    return health(client) == 503


def health(client):
    """What a server says of itself; None where nobody listens, or it has just stopped to."""
    try:
        return client.get("/health").status_code
    except (httpx2.NetworkError, httpx2.RemoteProtocolError):
        return None
