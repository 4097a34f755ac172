"""Generates many texts in one batch; when one ends, the next prompt takes its row (continuous batching).

Dims: R rows at most, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator
from math import inf
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.memory_limits import available_bytes, cache_bytes
from yggdrasil.runtime.side_by_side import allocate_rows

ROWS = 64  # maximum batch size: with more rows, matrix products are compute-bound
_MOST_BYTES = 2 << 30  # maximum of the KV cache
_ROOM_SHARE = 4  # the KV cache takes at most 1/4 of the free memory
_READ = 1024  # prompt tokens per pass, unless a single prompt is longer
_LIKELIEST = 50  # top-k of sampled prompts, as transformers' default


class Task(NamedTuple):
    """A prompt to answer greedily with at most ``most`` tokens.

    If ``most_sampled`` is not 0, the model first samples the rest of the prompt, up to an end token or ``most_sampled``
    tokens. The tokens ``suffix`` are then appended to the prompt.
    """

    prompt: list[int]
    most: int
    most_sampled: int = 0
    suffix: tuple[int, ...] = ()


class Written:
    """The text of a task as it grows: first the rest of a sampled prompt, then the answer, end token included."""

    def __init__(self, task: Task) -> None:
        self.task, self.prompt, self.tokens = task, list(task.prompt), list[int]()
        self.is_sampling = task.most_sampled > 0  # whether the prompt is still being sampled
        self._missing = list(task.suffix) if self.is_sampling else []  # rest of the suffix

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def last(self) -> int:
        """The last token id of the answer, or of the prompt while the answer is empty."""
        return (self.tokens or self.prompt)[-1]

    def append(self, chosen: int, ends: Collection[int]) -> None:
        """Append one token to the prompt while it is incomplete, else to the answer.

        While the prompt is sampled, ``chosen`` is appended, until it is in ``ends`` or the task's limit is reached.
        Then each call appends the next token of the suffix and ignores ``chosen``. If there is a suffix, it also
        replaces a sampled end token.

        Args:
            chosen: the token id that the model chose.
            ends: end-of-text token ids. In the answer they are appended like other tokens.
        """
        ends_prompt = self.is_sampling and chosen in ends
        if self._missing and (ends_prompt or not self.is_sampling):
            self.prompt.append(self._missing.pop(0))
        elif self.is_sampling:
            self.prompt.append(chosen)
        else:
            self.tokens.append(chosen)
        num_sampled = len(self.prompt) - len(self.task.prompt)
        self.is_sampling = self.is_sampling and not ends_prompt and num_sampled < self.task.most_sampled


def rows_that_fit(loaded: LoadedModel, capacity: int) -> int:
    """Return the batch size, 1 to 64, at which KV caches of ``capacity`` tokens a text fit into 2 GiB.

    On a CPU they also fit into 1/4 of the free memory. The result is 1 even if one cache does not fit.
    """
    left = available_bytes() if loaded.device.type == "cpu" else None
    available = _MOST_BYTES if left is None else min(_MOST_BYTES, left // _ROOM_SHARE)
    return max(1, min(ROWS, available // cache_bytes(loaded, capacity)))


class RowWriter:
    """Generates texts in a batch with ``loaded``, whose attention must be ``SIDE_BY_SIDE`` meanwhile.

    An answer ends at a token of ``ends``, at its task's limit, or when its text fills the ``capacity`` (tokens) of its
    row. ``seed`` is the seed of sampled prompts. ``num_rows`` is the batch size; None: ``rows_that_fit``.
    """

    def __init__(
        self, loaded: LoadedModel, ends: Collection[int], capacity: int, seed: int, num_rows: int | None = None
    ) -> None:
        self._rows = allocate_rows(loaded, num_rows or rows_that_fit(loaded, capacity), capacity)
        self._num_threads = loaded.num_threads
        self._ends, self._coins = ends, torch.Generator().manual_seed(seed)
        self._token_seconds: float | None = None  # measured in the last pass that read prompts

    def write(
        self,
        tasks: Iterator[Task],
        is_late: Callable[[], bool] = lambda: False,
        at_once: Callable[[float], float] = lambda token_seconds: inf,
    ) -> Iterator[list[Written]]:
        """Generate all ``tasks`` in one batch, and yield the texts that a pass has finished, if there are any.

        The next task is taken when a row of the batch is free.

        Args:
            is_late: once it returns True, all running texts are yielded unfinished, and the generator ends.
            at_once: maps the measured seconds per token to the maximum number of texts that may run together.
        """
        going: list[Written] = []
        while True:
            new = [Written(task) for task in self._next(tasks, self._room(at_once) - len(going))]
            if not going and not new:
                return
            start = perf_counter()
            logits = self._rows.read(
                [text.last for text in going], [text.length - 1 for text in going],
                [text.task.prompt for text in new],
            )  # fmt: skip
            if new:
                num_tokens = len(going) + sum(len(text.task.prompt) for text in new)
                self._token_seconds = (perf_counter() - start) / num_tokens
            going += new
            for text, token in zip(going, self._chosen(logits, going), strict=True):
                text.append(token, self._ends)
            if is_late():
                yield going
                return
            finished = [text for text in going if self._is_finished(text)]
            self._close_gaps(going)
            if finished:
                yield finished

    def _room(self, at_once: Callable[[float], float]) -> int:
        """Return the number of rows that may be used: 1 until the time per token has been measured."""
        if self._token_seconds is None:
            return 1
        return int(min(self._rows.num_rows, max(1.0, at_once(self._token_seconds))))

    def _next(self, tasks: Iterator[Task], free: int) -> Iterator[Task]:
        read = 0
        while free > 0 and read < _READ and (task := next(tasks, None)) is not None:
            yield task
            free, read = free - 1, read + len(task.prompt)

    @torch.inference_mode()
    def _chosen(self, logits: Tensor, texts: list[Written]) -> list[int]:
        tokens: list[int] = torch.ops.yggdrasil.best_tokens(logits, self._num_threads)[1].tolist()
        drawn = [row for row, text in enumerate(texts) if text.is_sampling]
        if drawn:
            best, candidates = logits[drawn].float().topk(min(_LIKELIEST, logits.shape[-1]))
            indices = torch.multinomial(best.softmax(-1).cpu(), 1, generator=self._coins)
            for row, token in zip(drawn, candidates.cpu().gather(1, indices)[:, 0].tolist(), strict=True):
                tokens[row] = token
        return tokens

    def _is_finished(self, text: Written) -> bool:
        is_full = len(text.tokens) >= text.task.most or text.length > self._rows.capacity
        return is_full or (bool(text.tokens) and text.last in self._ends)

    def _close_gaps(self, going: list[Written]) -> None:
        """Move the last running rows into the rows of finished texts, so that running rows are the first ones."""
        for row in reversed(range(len(going))):
            if self._is_finished(going[row]):
                last = going.pop()
                if row < len(going):
                    self._rows.copy(len(going), row, last.length - 1)
                    going[row] = last
