"""What a server does under many clients, clients that go away, and conversations that take turns."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import httpx2
from server_asking import ask, metric, streamed_text, text_of

SUBJECTS = ("rain", "bread", "tides", "ink")
PROMPTS = [f"Write {number} words about {subject}." for number in (3, 7) for subject in SUBJECTS]
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
# Every way to an answer: what the device decides and the host, speculation and none, a grammar, log-probabilities.
WAYS: list[dict[str, Any]] = [
    {}, {"speculation": False}, {"temperature": 0.8, "seed": 7}, {"stop": ["a", "e"], "include_stop": True},
    {"logprobs": True, "top_logprobs": 2}, {"n": 2, "temperature": 1.0, "seed": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}, "max_tokens": 24},
]  # fmt: skip


class _Request(NamedTuple):
    prompt: str
    way: int


def check_load(client: httpx2.Client, seconds: float) -> str:
    """Eight clients at a time, half of their answers streamed: each is what it is alone, and memory stays."""
    request = [_Request(prompt, way) for prompt in PROMPTS for way in range(len(WAYS))]
    alone = {each: _answers(client, each, is_streamed=False) for each in request}
    before, end, counts = metric(client, "process_resident_memory_bytes"), time.monotonic() + seconds, [0] * 8
    memory = [before]

    def load(number: int) -> None:
        chosen = random.Random(number)
        while time.monotonic() < end:
            each, is_streamed = chosen.choice(request), chosen.random() < 0.5
            found = _answers(client, each, is_streamed=is_streamed)
            assert found == alone[each], f"another answer under load than alone: {each}, {is_streamed = }"
            counts[number] += 1
            if number == 0:
                memory.append(metric(client, "process_resident_memory_bytes"))

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(load, number) for number in range(8)]:
            future.result()
    third = len(memory) // 3
    early, late = max(memory[third : 2 * third] or memory), max(memory[2 * third :])
    assert late < 1.02 * early, f"memory grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB in the last third"
    return (
        f"{sum(counts)} answers in {seconds:.0f} s, {min(counts)} to {max(counts)} a client, each as alone; memory "
        f"{before / 1e6:.0f} MB before, at most {early / 1e6:.0f} in the second third and {late / 1e6:.0f} in the last"
    )


def _answers(client: httpx2.Client, request: _Request, *, is_streamed: bool) -> list[str]:
    messages = [{"role": "user", "content": request.prompt}]
    body = {"messages": messages, "max_tokens": 48, **WAYS[request.way]}
    if is_streamed:
        return streamed_text(client, body)
    return [choice["message"]["content"] for choice in ask(client, **body)["choices"]]


def check_disconnects(client: httpx2.Client, count: int) -> str:
    """Clients that go away at random moments, whole bodies unsent, queued or answered; then an answer comes at once."""
    chosen = random.Random(1)

    def leave(wait: float) -> None:
        body = {"messages": [{"role": "user", "content": chosen.choice(PROMPTS)}], "stream": chosen.random() < 0.5}
        with suppress(httpx2.TimeoutException), httpx2.Client(base_url=client.base_url, headers=client.headers) as own:
            own.post("/v1/chat/completions", json=body, timeout=httpx2.Timeout(wait, connect=60))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, [chosen.uniform(0.001, 0.3) for _ in range(count)]))
    start = time.monotonic()
    text_of(client, "Hi", max_tokens=1)
    took = time.monotonic() - start
    assert took < 1, f"the answer after {count} disconnects took {took:.2f} s"
    return f"{count} clients went away; the next answer took {1e3 * took:.0f} ms"


def check_turns(client: httpx2.Client) -> str:
    """Ten turns of a chat, alone and with three others between them: how much of each prompt is read."""
    alone = _Turns.of(client, [f"{random.Random(0).random()}"])
    among = _Turns.of(client, [f"{subject} {random.Random(1).random()}" for subject in SUBJECTS])
    for name, turns in (("alone", alone), ("with three others", among)):
        assert turns.read < turns.whole / 2, f"{name}: {turns.read} of {turns.whole} prompt tokens were read"
    return (
        f"ten turns alone: {alone.read} of {alone.whole} prompt tokens read, {alone.milliseconds:.0f} ms; four such "
        f"chats in turns: {among.read} of {among.whole} read, {among.milliseconds:.0f} ms"
    )


class _Turns(NamedTuple):
    """Prompt tokens of chats, those that were read, and how long that took."""

    whole: int
    read: int
    milliseconds: float

    @classmethod
    def of(cls, client: httpx2.Client, names: list[str]) -> "_Turns":
        replies = list(_chats(client, names))
        usages = [reply["usage"] for reply in replies]
        whole = sum(usage["prompt_tokens"] for usage in usages)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return cls(whole, whole - cached, sum(reply["timings"]["prompt_ms"] for reply in replies))


def _chats(client: httpx2.Client, names: list[str]) -> Iterator[dict[str, Any]]:
    """Ten turns of each chat, one of each after the other."""
    chats: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    for number in range(10):
        for name, messages in chats.items():
            messages.append({"role": "user", "content": f"{name}: {PROMPTS[number % len(PROMPTS)]}"})
            reply = ask(client, messages=messages, max_tokens=16)
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
            yield reply
