"""What a server costs beside the library: both decode the same prompts in turns, on the same machine."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2

from yggdrasil.engine.decoder import Decoder

ROUNDS = 7
TOKENS = 128
TASKS = ("Explain how tides come about.", "Write a story about a lighthouse.", "List the steps to bake bread.")


class _Paced(NamedTuple):
    """One answer: milliseconds to its first text, and from there on for each token."""

    first: float
    per_token: float


def check_overhead(client: httpx2.Client, plan: str) -> str:
    """The first text comes at most 5 ms later than from the library, and a token takes at most 2 % longer."""
    decoder = Decoder.from_plan(plan)
    ways: dict[str, Callable[[list[dict[str, str]]], _Paced]] = {
        "library": lambda messages: _by_library(decoder, messages),
        "server": lambda messages: _by_server(client, messages),
    }
    found: dict[str, list[_Paced]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for task in TASKS:
            # No round begins as an earlier one did: what both keep of earlier texts is only the template's beginning.
            messages = [{"role": "user", "content": f"Round {number}. {task}"}]
            for name in sorted(ways, reverse=bool(number % 2)):
                found[name].append(ways[name](messages))
    found = {name: paced[len(TASKS) :] for name, paced in found.items()}  # the first round warms both
    later = [server.first - library.first for server, library in zip(found["server"], found["library"], strict=True)]
    slower = [
        server.per_token / library.per_token
        for server, library in zip(found["server"], found["library"], strict=True)
    ]  # fmt: skip
    first, ratio = statistics.median(later), statistics.median(slower)
    library = statistics.median(each.per_token for each in found["library"])
    said = (
        f"first text {first:+.1f} ms beside the library (quartiles {_quartiles(later)}), a token {ratio:.3f} times the "
        f"library's {library:.2f} ms (quartiles {_quartiles(slower)}), {len(later)} answers of {TOKENS} tokens each"
    )
    assert first <= 5, f"the first text comes too late: {said}"
    assert ratio <= 1.02, f"tokens come too slowly: {said}"
    return said


def _quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values)
    return f"{low:.3g} to {high:.3g}"


def _by_library(decoder: Decoder, messages: list[dict[str, str]]) -> _Paced:
    start = time.perf_counter()
    first = None
    request = decoder.start(decoder.encode_chat(messages), max_new_tokens=TOKENS, ignore_eos=True)
    for text in request:
        first = first or (time.perf_counter() if text else None)
    return _paced(start, first, time.perf_counter(), len(request.result().tokens))


def _by_server(client: httpx2.Client, messages: list[dict[str, str]]) -> _Paced:
    body: dict[str, Any] = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    start = time.perf_counter()
    first, tokens = None, 0
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if first is None and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first = time.perf_counter()
            if "timings" in chunk:
                end, tokens = time.perf_counter(), chunk["timings"]["predicted_n"]
    return _paced(start, first, end, tokens)


def _paced(start: float, first: float | None, end: float, tokens: int) -> _Paced:
    assert first is not None
    assert tokens == TOKENS, f"{tokens} tokens came instead of {TOKENS}"
    return _Paced(1e3 * (first - start), 1e3 * (end - first) / (tokens - 1))
