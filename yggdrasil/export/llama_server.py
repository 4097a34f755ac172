"""Client of a llama-server: measures its pass times and generates greedy answers."""

import json
import random
import re
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from math import inf
from time import monotonic
from typing import Any, TypeVar

from yggdrasil.arguments import check_tokens
from yggdrasil.artifacts import parse_json
from yggdrasil.calibration.own_text import Document
from yggdrasil.errors import YggdrasilError, one_line

T = TypeVar("T")

WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49)
ROUNDS, STEPS = 7, 48  # most rounds of measurements; tokens generated to time plain steps
PASSES_SECONDS = 120.0  # a further round of measurements begins only if it will end within this time
_CONTEXT = 128  # tokens before the measured ones
_SECONDS = 600  # timeout of a request


class LlamaServer:
    """A llama-server at ``url``. Every failure raises a YggdrasilError that names the URL."""

    def __init__(self, url: str) -> None:
        if not re.fullmatch(r"https?://([^\s\[\]/]+|\[[\da-fA-F:.]+\](:\d+)?)(/\S*)?", url):
            raise YggdrasilError(f"the url {url} is not the address of a server, such as http://127.0.0.1:8080")
        self._url = url.rstrip("/")

    def describe(self) -> str:
        """Return the name of the build that llama-server reports.

        Raises:
            YggdrasilError: the server does not answer as llama-server does.
        """
        return self._ask("/props", lambda said: one_line(said.get("build_info", "an unknown build")))

    def pass_ms(self, report: Callable[[float], None]) -> dict[int, float]:
        """Measure the milliseconds of a pass for each number of rows W in ``WIDTHS``, logits of every row included.

        With prompt(W) the median time of reading W prompt tokens, and share the LM head's share of the weights:

            ms[1] = plain, the median step of generation without speculation
            ms[W] = plain + (prompt(W) - prompt(1)) / (1 - share) + (prompt(1) - plain)

        The factor stands for the logits of all W rows, since llama-server computes logits of the last prompt token
        only. The last term is the time to rebuild the server's graph after a pass of another width. Negative
        differences count as 0. Every width is measured once a round, in at most ``ROUNDS`` rounds. A round after the
        first begins only if it will end within ``PASSES_SECONDS``.

        Args:
            report: takes the fraction done, 0 to 1.

        Raises:
            YggdrasilError: the server does not answer as llama-server does, speculates, or reads other tokens than the
                W new ones.
        """
        began = monotonic()
        numbers = random.Random(0)
        vocabulary, share = self._sizes()
        context = [numbers.randrange(1, vocabulary) for _ in range(_CONTEXT)]
        read: dict[int, list[float]] = {width: [] for width in WIDTHS}
        plain: list[float] = []
        for turn in range(ROUNDS):
            for number, width in enumerate(numbers.sample(WIDTHS, len(WIDTHS))):
                report((turn + number / len(WIDTHS)) / ROUNDS)
                read[width].append(self._read_ms(context, [numbers.randrange(1, vocabulary) for _ in range(width)]))
            plain.append(self._step_ms([numbers.randrange(1, vocabulary) for _ in range(_CONTEXT)]))
            if (monotonic() - began) * (turn + 2) / (turn + 1) > PASSES_SECONDS:
                break
        report(1.0)
        one = statistics.median(read[1])
        more = {width: max(statistics.median(times) - one, 0.0) / (1.0 - share) for width, times in read.items()}
        step = statistics.median(plain)
        anew = max(one - step, 0.0)
        return {width: step + (anew if width > 1 else 0.0) + extra for width, extra in more.items()}

    def answer(self, prompt: Sequence[int], tokens: int) -> Document:
        """Let llama-server generate ``tokens`` greedy tokens after ``prompt`` (token ids), end-of-text tokens ignored.

        The result has the token ids of prompt and answer.

        Raises:
            YggdrasilError: the server does not answer as llama-server does.
        """
        options = {"n_predict": tokens, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        found = self._complete(prompt, lambda said: check_tokens("tokens", said["tokens"]), **options)
        return Document(list(prompt), found)

    def _sizes(self) -> tuple[int, float]:
        """Return the vocabulary size and the LM head's share of the parameters."""

        def read(said: Any) -> tuple[int, float]:
            meta = said["data"][0]["meta"]
            vocabulary, share = int(meta["n_vocab"]), float(meta["n_vocab"] * meta["n_embd"] / meta["n_params"])
            if vocabulary < 3 or not 0.0 <= share < 1.0:
                raise ValueError(f"a vocabulary of {vocabulary}, with {share:.0%} of the weights in the head")
            return vocabulary, share

        return self._ask("/v1/models", read)

    def _read_ms(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        """Return milliseconds in which the server reads ``tokens`` after ``context``, which its cache holds."""
        read = 0
        for _ in range(2):  # the first request may also read the context
            read, ms = self._complete(
                [*context, *tokens], lambda said: _timing(said, "prompt_n", "prompt_ms"), n_predict=0, cache_prompt=True
            )
            if read == len(tokens):
                return ms
            self._complete([*context, tokens[0] ^ 1], lambda _: None, n_predict=0, cache_prompt=True)
        raise YggdrasilError(
            f"{self._url} read {read} tokens where {len(tokens)} were new; start it with --parallel 1 and without "
            "--no-cache-prompt"
        )

    def _step_ms(self, prompt: Sequence[int]) -> float:
        """Return the server's milliseconds per token in generating ``STEPS`` tokens after ``prompt``."""
        options = {"n_predict": STEPS, "ignore_eos": True, "cache_prompt": True}
        (count, ms), is_drafted = self._complete(
            prompt,
            lambda said: (_timing(said, "predicted_n", "predicted_ms"), bool(said["timings"].get("draft_n"))),
            **options,
        )
        if is_drafted:
            raise YggdrasilError(f"{self._url} speculates; start it with --spec-type none to measure its costs")
        return ms / max(count - 1, 1)

    def _complete(self, prompt: Sequence[int], read: Callable[[Any], T], **options: Any) -> T:
        greedy = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "id_slot": 0}
        return self._ask("/completion", read, {"prompt": list(prompt), **greedy, **options})

    def _ask(self, path: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """Send a request and return ``read`` of the JSON answer. Raises YggdrasilError if either fails."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return read(parse_json(answer.read()))
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else one_line(error)
            raise YggdrasilError(f"{self._url}{path} did not answer as llama-server does ({reason})") from None


def _timing(said: Any, count: str, ms: str) -> tuple[int, float]:
    """Return the token count named ``count`` and the milliseconds named ``ms`` in an answer's timings."""
    timings = said["timings"]
    found = float(timings[ms])
    if not 0.0 < found < inf:
        raise ValueError(f"{ms} is {found}")
    return int(timings[count]), found
