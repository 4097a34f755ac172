"""Servers of the bundled pair, each on a port of its own."""

import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import httpx2
import torch
import uvicorn
from pydantic import BaseModel

import yggdrasil
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import load_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.serving.app import create_app
from yggdrasil.serving.client_socket import OpenProtocol
from yggdrasil.serving.server_settings import ServerSettings
from yggdrasil.serving.worker import Worker
from yggdrasil.tree.shape import TreeShape

MODEL = "tiny"
ASSETS = Path(yggdrasil.__file__).parent / "assets" / "tiny"
SHAPES = Shapes(max_length=512, draft_widths=(1, 2), max_depth=3, verify_widths=(1, 2, 4, 8), prefill_widths=(16, 64))
# As Qwen's: tools are shown as JSON, a call is JSON between marks.
TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def open_pair() -> Decoder:
    """The bundled pair on eager steps, speculating at every step."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(ASSETS / "target")
    tokenizer.chat_template = TEMPLATE
    models = [load_model(ASSETS / name, torch.float32, torch.device("cpu"), 1) for name in ("target", "drafter")]
    assembly = assemble(*models, SHAPES, "eager")
    return Decoder(assembly, tokenizer, FixedPolicy(TreeShape(2, 3, 8)), frozenset({tokenizer.eos_token_id}))


class Weather(BaseModel):
    """What a structured answer must be."""

    city: Literal["Oslo", "Rome"]
    warm: bool


class Running(NamedTuple):
    """A server that answers."""

    url: str
    worker: Worker
    client: httpx2.Client
    uvicorn: uvicorn.Server

    def post(self, path, expect=200, **body):
        reply = self.client.post(path, json=body)
        assert reply.status_code == expect, reply.text
        return reply.json()

    def chat(self, text="Say something", expect=200, **body):
        return self.post("/v1/chat/completions", expect, messages=[{"role": "user", "content": text}], **body)

    def stream(self, path, **body):
        """The events of a stream as objects, the end mark left out; framing is checked on the way."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            text = reply.read().decode("ascii")
        assert text.endswith("data: [DONE]\n\n")
        frames = text.removesuffix("\n\n").split("\n\n")
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]

    @contextmanager
    def slow_stream(self, version=b"1.1", buffer_bytes=None, **body):
        """A connection with an unread streamed chat; ``buffer_bytes``: size of the server's socket buffer."""
        (listener,) = self.uvicorn.servers[0].sockets
        usual = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        data = json.dumps({**body, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            if buffer_bytes:  # those that are accepted from now on have the same
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            client.connect(listener.getsockname())
            head = b"POST /v1/chat/completions HTTP/%b\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (head % version, len(data), data))
            client.settimeout(30)
            try:
                yield client
            finally:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, usual // 2)  # the system doubles it


def until_done(client):
    """The bytes of a stream up to its end mark."""
    found = b""
    while b"data: [DONE]" not in found[-40:]:
        part = client.recv(1 << 16)
        assert part, "the server closed the connection"
        found += part
    return found


def chunks_of(body):
    """The events of a stream's bytes."""
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]


@contextmanager
def serving(opening, settings=ServerSettings()):  # noqa: B008  (frozen)
    """A server in a thread, stopped as SIGTERM would stop it."""
    worker = Worker(opening, settings)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(worker, settings, MODEL),
            port=0,
            http=OpenProtocol,
            log_level="warning",
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx2.Client(base_url=url, timeout=60) as client:
        yield Running(url, worker, client, server)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def wait_until(condition, seconds=60.0):
    """Let other threads go on until something holds."""
    ticks = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        ticks.wait(0.01)
    raise AssertionError("it never came to that")
