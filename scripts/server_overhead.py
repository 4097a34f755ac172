"""What a server costs beside the library: one process decodes the same prompts either way in turns.

Both ways share one decoder, and so its memory, its learned costs and its luck with pages, in which two processes differ
by more than a server costs. The client is a process of its own that only notes when bytes come. Every prompt is
answered several times each way, each time right behind the other way: what else a machine does makes a single answer
a tenth slower, so only the median of many such pairs says what two per cent are. After a first round, which warms both,
none is left out.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from served import free_port, wait_until_served

from yggdrasil.engine.decoder import Decoder
from yggdrasil.serving.process import run_server
from yggdrasil.serving.server_settings import ServerSettings

ROUNDS, REPEATS = 5, 8
TOKENS = 64
SETTLE_SECONDS = 0.1  # threads of the answer before spin for a while
TASKS = ("Explain how tides come about.", "Write a story about a lighthouse.", "List the steps to bake bread.")
OTHER = "Name the days of the week."


class _Paced(NamedTuple):
    """One answer: milliseconds to its first text, and from there on for each token."""

    first: float
    per_token: float


Way = Callable[[list[dict[str, str]]], _Paced]


def check_overhead(plan: str) -> str:
    """The first text comes at most 5 ms later than from the library, and a token takes at most 2 % longer."""
    with _ways(plan) as ways:
        pairs: list[list[tuple[_Paced, _Paced]]] = []
        for number in range(ROUNDS):
            for task in TASKS:
                answers: dict[str, list[_Paced]] = {name: [] for name in ways}
                for repeat in range(REPEATS):
                    for name in sorted(ways, reverse=bool((number + repeat) % 2)):
                        ways["server"](_asking(OTHER))  # the caches hold another text, which the server keeps
                        time.sleep(SETTLE_SECONDS)
                        answers[name].append(ways[name](_asking(f"Round {number}. {task}")))
                if number:  # the first round warms both
                    pairs.append(list(zip(answers["server"], answers["library"], strict=True)))
    # Only the first answer finds nothing of its prompt in what was kept.
    later = [server.first - library.first for (server, library), *_ in pairs]
    slower = [server.per_token / library.per_token for answers in pairs for server, library in answers]
    fastest = [min(s.per_token for s, _ in each) / min(x.per_token for _, x in each) for each in pairs]
    first, ratio = statistics.median(later), statistics.median(slower)
    of_library = statistics.median(library.first for (_, library), *_ in pairs)
    a_token = statistics.median(library.per_token for answers in pairs for _, library in answers)
    said = (
        f"first text {first:+.1f} ms beside the library's {of_library:.1f} (quartiles {_quartiles(later)}), a token "
        f"{ratio:.3f} times the library's {a_token:.2f} ms (quartiles {_quartiles(slower)}; the fastest answers to a "
        f"prompt {statistics.median(fastest):.3f}), {len(pairs)} prompts, {TOKENS} tokens each, {REPEATS} times"
    )
    assert first <= 5, f"the first text comes too late: {said}"
    assert ratio <= 1.02, f"tokens come too slowly: {said}"
    return said


@contextmanager
def _ways(plan: str) -> Iterator[dict[str, Way]]:
    """A server in this process, and both ways to an answer of its decoder."""
    opened: list[Decoder] = []

    def opening() -> Decoder:
        opened.append(Decoder.from_plan(plan))
        return opened[0]

    port = free_port()
    Thread(target=run_server, args=(opening, ServerSettings(), plan, "127.0.0.1", port), daemon=True).start()
    wait_until_served(f"http://127.0.0.1:{port}")
    decoder = opened[0]
    reader = Path(__file__).with_name("server_reader.py")
    with subprocess.Popen(
        [sys.executable, str(reader), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None

        def by_server(messages: list[dict[str, str]]) -> _Paced:
            assert client.stdin is not None
            assert client.stdout is not None
            body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            client.stdin.write(json.dumps(body) + "\n")
            client.stdin.flush()
            first, end, tokens = json.loads(client.stdout.readline())
            return _paced(first, end, tokens)

        yield {"library": lambda messages: _by_library(decoder, messages), "server": by_server}
        client.stdin.close()


def _asking(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _by_library(decoder: Decoder, messages: list[dict[str, str]]) -> _Paced:
    start = time.perf_counter()
    first = None
    request = decoder.start(decoder.encode_chat(messages), max_new_tokens=TOKENS, ignore_eos=True)
    for text in request:
        first = first or (time.perf_counter() if text else None)
    assert first is not None
    return _paced(first - start, time.perf_counter() - start, len(request.result().tokens))


def _paced(first: float, end: float, tokens: int) -> _Paced:
    assert tokens == TOKENS, f"{tokens} tokens came instead of {TOKENS}"
    return _Paced(1e3 * first, 1e3 * (end - first) / (tokens - 1))


def _quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values)
    return f"{low:.3g} to {high:.3g}"
