"""Memory of a server under mixed requests of four clients: what it holds before, at most, and afterwards."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import httpx2
from server_asking import metric

CLIENTS = 4
BODY_MIB = 8  # the most that a request may have, MiB
SETTLING = 15.0  # seconds without a request before the last figure
WORDS = ("rain", "bread", "tides", "ink", "copper", "winter", "ladder", "seven", "harbour", "glass", "lemon", "paper")
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}, "why": {"type": "string", "maxLength": 60}}}


def check_memory(client: httpx2.Client, requests: int, keep_mb: int) -> str:
    """Send ``requests`` mixed requests; return megabytes before, at most and after ``SETTLING`` seconds of rest.

    ``keep_mb`` is the server's ``--keep-mb``, in MiB.

    Raises:
        AssertionError: the server's memory grew by more.
    """
    context = client.get("/v1/models").json()["data"][0]["meta"]["n_ctx"]
    _answer(client, [{"role": "user", "content": "Hello"}], max_tokens=8)
    seen = [_megabytes(client)]
    long = partial(_long, context=context)
    kinds: list[Callable[[httpx2.Client, random.Random, list[Any]], object]] = [
        _turn, _turn, _turn, _schema, _logprobs, _disconnect, long, _huge
    ]  # fmt: skip

    def mixed(number: int) -> None:
        chosen, chat = random.Random(number), list[Any]()
        with httpx2.Client(base_url=client.base_url, headers=client.headers, timeout=600) as own:
            for _ in range(requests // CLIENTS):
                chosen.choice(kinds)(own, chosen, chat)
                seen.append(_megabytes(own))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(mixed, range(CLIENTS)))
    time.sleep(SETTLING)
    return bounds_sentence(requests, seen, _megabytes(client), keep_mb)


def bounds_sentence(requests: int, seen: list[float], afterwards: float, keep_mb: int) -> str:
    """Return a line with the memory that a server held, in megabytes: the first and the largest of ``seen``, the last.

    Raises:
        AssertionError: it grew by more than ``keep_mb`` MiB, or while requests ran by more than that and their bodies.
    """
    most, bound = max(*seen, afterwards), seen[0] + _mib(keep_mb)
    figures = f"{requests} requests; {seen[0]:.0f} MB before, at most {most:.0f}, {afterwards:.0f} afterwards"
    assert afterwards <= bound, f"{figures}: beyond {bound:.0f}, the first figure and --keep-mb {keep_mb}"
    running = bound + _mib(CLIENTS * BODY_MIB)
    assert most <= running, f"{figures}: beyond {running:.0f} while requests ran"
    return f"{figures}; the bounds are {running:.0f} and {bound:.0f}"


def _mib(count: int) -> float:
    return count * (1 << 20) / 1e6


def _megabytes(client: httpx2.Client) -> float:
    return metric(client, "process_resident_memory_bytes") / 1e6


def _answer(client: httpx2.Client, messages: list[dict[str, str]], **body: Any) -> str:
    """Return the answer to a chat, or what continues its texts where the model has no chat template."""
    reply = client.post("/v1/chat/completions", json={"messages": messages, **body})
    if reply.status_code == 400 and "chat template" in reply.text:
        prompt = "\n\n".join(message["content"] for message in messages)
        reply = client.post("/v1/completions", json={"prompt": prompt, **body})
    assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
    (choice,) = reply.json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _text(chosen: random.Random, words: int) -> str:
    return " ".join(chosen.choices(WORDS, k=words))


def _turn(client: httpx2.Client, chosen: random.Random, chat: list[Any]) -> None:
    """One more turn of a chat, which begins anew after eight."""
    if len(chat) >= 16:
        chat.clear()
    chat.append({"role": "user", "content": f"Write about {_text(chosen, chosen.choice((3, 40, 150)))}."})
    chat.append({"role": "assistant", "content": _answer(client, chat, max_tokens=48)})


def _schema(client: httpx2.Client, chosen: random.Random, _: list[Any]) -> None:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], _text(chosen, 1): {"type": "boolean"}}}  # type: ignore[dict-item]
    shape = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    _answer(client, [{"role": "user", "content": _text(chosen, 9)}], max_tokens=48, response_format=shape)


def _logprobs(client: httpx2.Client, chosen: random.Random, _: list[Any]) -> None:
    body = {"prompt": _text(chosen, 300), "max_tokens": 4, "echo": True, "logprobs": 3}
    client.post("/v1/completions", json=body).raise_for_status()


def _long(client: httpx2.Client, chosen: random.Random, _: list[Any], context: int) -> None:
    """A prompt of about a third of the context, which two tokens a word would still not exceed."""
    body = {"prompt": _text(chosen, context // 4), "max_tokens": 16}
    client.post("/v1/completions", json=body).raise_for_status()


def _huge(client: httpx2.Client, chosen: random.Random, _: list[Any]) -> None:
    """Megabytes of text, which are refused."""
    body = {"prompt": _text(chosen, 400) * chosen.randint(500, 2500), "max_tokens": 4}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code in (400, 413), f"{reply.status_code}: {reply.text[:200]}"


def _disconnect(client: httpx2.Client, chosen: random.Random, _: list[Any]) -> None:
    body = {"prompt": _text(chosen, 60), "max_tokens": 200, "stream": True}
    with suppress(httpx2.TimeoutException):
        client.post("/v1/completions", json=body, timeout=httpx2.Timeout(chosen.uniform(0.1, 1.0), connect=60))
