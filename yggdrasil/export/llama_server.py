"""Ask a running llama-server what its passes cost, and how the model goes on."""

import json
import random
import re
import statistics
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from yggdrasil.calibration.own_text import Document
from yggdrasil.errors import YggdrasilError

WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49)
ROUNDS, STEPS = 7, 48  # passes of each width; tokens of a plain stretch
_CONTEXT = 128  # tokens before the measured ones
_SECONDS = 600


class LlamaServer:
    """A llama-server at ``url``; every failure is a sentence that names it."""

    def __init__(self, url: str) -> None:
        if not re.fullmatch(r"https?://([^\s\[\]/]+|\[[\da-fA-F:.]+\](:\d+)?)(/\S*)?", url):
            raise YggdrasilError(f"the url {url} is not the address of a server, such as http://127.0.0.1:8080")
        self._url = url.rstrip("/")

    def describe(self) -> str:
        """Its build, as it says itself."""
        return str(self._ask("/props").get("build_info", "an unknown build"))

    def pass_ms(self, report: Callable[[float], None]) -> dict[int, float]:
        """Milliseconds of a pass by the rows it reads, logits of each row included.

        Width 1 is a plain step as it is decoded, of a stretch without speculation where the server has none. Wider ones
        add to it what reading so many prompt tokens takes more than reading one. A prompt's rows have no logits but the
        last's, so the head's share of the weights is added for the others.
        """
        numbers = random.Random(0)
        vocabulary, share = self._sizes()
        context = [numbers.randrange(1, vocabulary) for _ in range(_CONTEXT)]
        read: dict[int, list[float]] = {width: [] for width in WIDTHS}
        plain: list[float] = []
        for turn in range(ROUNDS):
            for width in numbers.sample(WIDTHS, len(WIDTHS)):
                read[width].append(self._read_ms(context, [numbers.randrange(1, vocabulary) for _ in range(width)]))
            plain.append(self._step_ms([numbers.randrange(1, vocabulary) for _ in range(_CONTEXT)]))
            report((turn + 1) / ROUNDS)
        one = statistics.median(read[1])
        more = {width: max(statistics.median(times) - one, 0.0) / (1.0 - share) for width, times in read.items()}
        step = statistics.median(plain)
        return {width: step + extra for width, extra in more.items()}

    def answer(self, prompt: Sequence[int], tokens: int) -> Document:
        """How the model goes on greedily, past an end too."""
        found = self._complete(list(prompt), n_predict=tokens, ignore_eos=True, return_tokens=True, cache_prompt=False)
        return Document(list(prompt), list(found["tokens"]))

    def _sizes(self) -> tuple[int, float]:
        """The vocabulary, and the share of the weights that the head has."""
        try:
            meta = self._ask("/v1/models")["data"][0]["meta"]
            return int(meta["n_vocab"]), float(meta["n_vocab"] * meta["n_embd"] / meta["n_params"])
        except (KeyError, IndexError, TypeError, ZeroDivisionError):
            raise YggdrasilError(f"{self._url} does not say what model it has, as llama-server does") from None

    def _read_ms(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        """Milliseconds of reading ``tokens`` behind a context that is in the cache."""
        for _ in range(2):  # the first may have to read the context
            timings = self._complete([*context, *tokens], n_predict=0, cache_prompt=True)["timings"]
            if timings["prompt_n"] == len(tokens):
                return float(timings["prompt_ms"])
            self._complete([*context, tokens[0] ^ 1], n_predict=0, cache_prompt=True)
        raise YggdrasilError(
            f"{self._url} read {timings['prompt_n']} tokens where {len(tokens)} were new; start it with --parallel 1 "
            "and without --no-cache-prompt"
        )

    def _step_ms(self, prompt: Sequence[int]) -> float:
        timings = self._complete(list(prompt), n_predict=STEPS, ignore_eos=True, cache_prompt=True)["timings"]
        if timings.get("draft_n"):
            raise YggdrasilError(f"{self._url} speculates; start it with --spec-type none to measure its costs")
        return float(timings["predicted_ms"]) / max(int(timings["predicted_n"]) - 1, 1)

    def _complete(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        greedy = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "id_slot": 0}
        found: dict[str, Any] = self._ask("/completion", {"prompt": prompt, **greedy, **options})
        return found

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError) as error:
            raise YggdrasilError(f"{self._url}{path} did not answer as llama-server does ({error})") from None
