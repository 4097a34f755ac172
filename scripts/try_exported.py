#!/usr/bin/env python3
"""Start another engine with settings that `yggdrasil export` printed, and compare its greedy answers with ours.

    scripts/try_exported.py model.gguf --program llama-server -- $(yggdrasil export model.gguf --to llama-server ...)
    scripts/try_exported.py model/ --program vllm -- --speculative-config '{"method": "ngram", ...}'

The engine is started on a free port and answers one chat and one completion through OpenAI's API, as does
`yggdrasil serve` on the same model. Printed are the characters on which both agree and the drafted and accepted tokens
that the engine's own metrics report. Engines round differently, so texts may part at a near tie; the exit code is 1
where a text differs in its first 40 characters, or where the engine drafted nothing.
"""

import json
import re
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from served import free_port, running, serving

from yggdrasil.cli import run_script
from yggdrasil.errors import YggdrasilError
from yggdrasil.export.settings import EngineName

CHAT = "Write the numbers from one to twenty in words, then write them again."
COMPLETION = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"
MAX_TOKENS = 96
LEAST_EQUAL = 40  # characters
# Names of counters: of drafted and of accepted tokens.
COUNTERS = {
    "vllm": ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    "sglang": ("sglang:spec_num_draft_tokens_total", "sglang:spec_num_accepted_tokens_total"),
}


def main(
    model: Annotated[str, typer.Argument(help="A .gguf file for llama-server, a checkpoint folder for the others.")],
    options: Annotated[list[str], typer.Argument(help="Settings as exported, behind --.")],
    program: Annotated[Path, typer.Option(help="llama-server, vllm, or a Python that has sglang.")],
    engine: Annotated[EngineName, typer.Option(help="The engine.")] = "llama-server",
    extra: Annotated[str, typer.Option(help="Further options of the engine, separated by spaces.")] = "",
    dtype: Annotated[str, typer.Option(help="Of our weights.")] = "float32",
) -> None:
    """Print how far both texts agree, and what was drafted and accepted."""
    if shutil.which(program) is None:
        raise YggdrasilError(f"--program: {program} is no program; give its path")
    with started(engine, program, model, [*options, *extra.split()]) as url:
        theirs, drafted, accepted = answers(url), *counted(engine, url)
    with serving(model, "--greedy", "--dtype", dtype) as url:
        ours = answers(url)
    equal = {name: common_characters(text, theirs[name]) for name, text in ours.items()}
    for name, text in ours.items():
        print(f"{name}: the first {equal[name]} of {len(text)} characters are equal")
    print(f"drafted {drafted}, accepted {accepted} tokens")
    if drafted == 0 or any(equal[name] < min(LEAST_EQUAL, len(text)) for name, text in ours.items()):
        print(f"{engine} drafted nothing, or its text is another: {json.dumps([ours, theirs])}", file=sys.stderr)
        raise typer.Exit(1)


def common_characters(one: str, other: str) -> int:
    """Return the length of the common prefix of both texts, in characters."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@contextmanager
def started(engine: str, program: Path, model: str, options: list[str]) -> Iterator[str]:
    """Run the engine on a free port until the end of the block; yield its address."""
    port = str(free_port())
    command = {
        "llama-server": [str(program), "--model", model, "--parallel", "1", "--metrics", "--port", port],
        "vllm": [str(program), "serve", model, "--port", port],
        "sglang": [str(program), "-m", "sglang.launch_server", "--model-path", model, "--port", port],
    }[engine]
    url = f"http://127.0.0.1:{port}"
    with running([*command, *options], url):
        yield url


def answers(url: str) -> dict[str, str]:
    """Ask the server at ``url`` for a chat and a completion; return both greedy texts by name."""
    model = ask(url, "/v1/models")["data"][0]["id"]
    usual = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0, "seed": 0}
    chat = ask(url, "/v1/chat/completions", usual | {"messages": [{"role": "user", "content": CHAT}]})
    completion = ask(url, "/v1/completions", usual | {"prompt": COMPLETION})
    return {"chat": chat["choices"][0]["message"]["content"], "completion": completion["choices"][0]["text"]}


def counted(engine: str, url: str) -> tuple[int, int]:
    """Return the numbers of drafted and accepted tokens.

    vLLM and SGLang count them over all requests; llama-server reports them per answer, so this sends one more request.
    """
    if engine == "llama-server":
        body = {"prompt": COMPLETION, "n_predict": MAX_TOKENS, "temperature": 0, "cache_prompt": False}
        timings = ask(url, "/completion", body)["timings"]
        return int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    drafted, accepted = (
        sum(int(float(each)) for each in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))
        for name in COUNTERS[engine]
    )
    return drafted, accepted


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON at ``url`` + ``path``; with ``body`` the request is a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    run_script(main, "try_exported")
