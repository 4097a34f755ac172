#!/usr/bin/env python3
"""Check a running server: its SDK, answers under load, disconnects, and what it costs beside the library.

    scripts/check_server.py --url http://127.0.0.1:8000 --section load --section disconnects

Each section prints one line of figures and fails with a sentence.
"""

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any

import httpx2
import typer

PROMPTS = [
    f"Write {number} words about {subject}." for number in (3, 7) for subject in ("rain", "bread", "tides", "ink")
]


def main(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    section: Annotated[list[str] | None, typer.Option(help="sdk, load, disconnects, turns; else all.")] = None,
    key: Annotated[str, typer.Option(help="Its key.")] = "none",
    seconds: Annotated[float, typer.Option(help="How long the load lasts.")] = 60.0,
    disconnects: Annotated[int, typer.Option(help="How many clients go away.")] = 1000,
) -> None:
    """Run the sections one after the other."""
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600) as client:
        sections = {
            "sdk": lambda: check_sdk(url, key),
            "load": lambda: check_load(client, seconds),
            "disconnects": lambda: check_disconnects(client, disconnects),
            "turns": lambda: check_turns(client),
        }
        for name in section or sections:
            if name not in sections:
                raise typer.BadParameter(f"there is no section {name}; there are {', '.join(sections)}")
            print(f"{name}: {sections[name]()}", flush=True)


def chat(client: httpx2.Client, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """One answer, whole."""
    reply = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": tokens})
    reply.raise_for_status()
    return reply.json()


def text_of(client: httpx2.Client, prompt: str) -> str:
    return chat(client, [{"role": "user", "content": prompt}], 48)["choices"][0]["message"]["content"]


def check_sdk(url: str, key: str) -> str:
    """The SDK's own types take what comes, whole and streamed."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    streamed = client.chat.completions.create(model=model, messages=messages, max_tokens=32, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == whole.choices[0].message.content, "the stream says something else than the whole answer"
    return f"{model} answers {len(text)} characters alike, whole and streamed"


def check_load(client: httpx2.Client, seconds: float) -> str:
    """Eight clients at a time: every answer is what it is alone."""
    alone = {prompt: text_of(client, prompt) for prompt in PROMPTS}
    end, counts = time.monotonic() + seconds, [0] * 8

    def ask(number: int) -> None:
        chosen = random.Random(number)
        while time.monotonic() < end:
            prompt = chosen.choice(PROMPTS)
            assert text_of(client, prompt) == alone[prompt], f"another answer under load: {prompt}"
            counts[number] += 1

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(ask, number) for number in range(8)]:
            future.result()
    return f"{sum(counts)} answers, all as alone; {min(counts)} to {max(counts)} a client"


def check_disconnects(client: httpx2.Client, count: int) -> str:
    """Clients that go away at random moments; then an answer comes at once."""
    chosen = random.Random(1)

    def leave(wait: float) -> None:
        body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "stream": chosen.random() < 0.5}
        with suppress(httpx2.TimeoutException):
            client.post("/v1/chat/completions", json=body, timeout=httpx2.Timeout(wait, connect=60))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, [chosen.uniform(0.001, 0.3) for _ in range(count)]))
    start = time.monotonic()
    chat(client, [{"role": "user", "content": "Hi"}], 1)
    took = time.monotonic() - start
    assert took < 1, f"the answer after {count} disconnects took {took:.2f} s"
    return f"{count} clients went away; the next answer took {1e3 * took:.0f} ms"


def check_turns(client: httpx2.Client) -> str:
    """Ten turns of a chat: how much of each prompt is read."""
    messages: list[dict[str, str]] = []
    read, whole = [], []
    for prompt in [*PROMPTS, *PROMPTS][:10]:
        messages.append({"role": "user", "content": prompt})
        reply = chat(client, messages, 24)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        usage = reply["usage"]
        whole.append(usage["prompt_tokens"])
        read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    return f"prompt tokens read {sum(read)} of {sum(whole)} (median {statistics.median(read):.0f} a turn)"


if __name__ == "__main__":
    typer.run(main)
