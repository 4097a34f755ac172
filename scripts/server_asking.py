"""Requests to a running server, as bare as they come."""

import json
from typing import Any

import httpx2


def ask(client: httpx2.Client, **body: Any) -> dict[str, Any]:
    """One chat completion, whole."""
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
    return reply.json()


def text_of(client: httpx2.Client, prompt: str, **body: Any) -> str:
    """The answer to a prompt."""
    reply = ask(client, messages=[{"role": "user", "content": prompt}], **body)
    return reply["choices"][0]["message"]["content"]


def streamed_text(client: httpx2.Client, body: dict[str, Any]) -> list[str]:
    """The same answers as a stream: the text of each choice."""
    found: dict[int, str] = {}
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found[choice["index"]] = found.get(choice["index"], "") + choice["delta"].get("content", "")
    return [found[index] for index in sorted(found)]


def metric(client: httpx2.Client, name: str) -> float:
    """A figure of ``/metrics``."""
    lines = client.get("/metrics").text.splitlines()
    found = next((line for line in lines if line.startswith(f"{name} ")), None)
    assert found is not None, f"the server tells no {name}"
    return float(found.split()[-1])
