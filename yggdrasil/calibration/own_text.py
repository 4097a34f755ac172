"""The target's own text: its greedy answers to prompts, kept in the user's cache and added to by later calibrations.

Prompts are the user's; when those are answered, a chat model writes users' turns itself, from its bare template (as in
arXiv 2406.08464), and another model goes on from openings that it draws itself. Answers are greedy, many side by side:
nothing of it needs to be exact to the last bit, since it only teaches what is likely.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from yggdrasil.arguments import check_tokens
from yggdrasil.artifacts import shown, write_atomic
from yggdrasil.artifacts.atomic import cannot_write
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.calibration.calibration_settings import Budget
from yggdrasil.calibration.row_writer import ROWS, RowWriter, Task, Written
from yggdrasil.calibration.work_folder import read_or_drop
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.engine.end_tokens import end_tokens
from yggdrasil.native import is_native
from yggdrasil.native.one_thread import one_thread
from yggdrasil.prompts import encode_chat
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.side_by_side import SIDE_BY_SIDE

ANSWER, OPENING = 256, 96  # tokens at most: of an answer, and of what the model opens with itself
_LEAST = 16  # tokens of an answer that is kept although it was cut, because time was up
_LONGEST_PROMPT = 512  # tokens kept of a prompt, the last ones
_SORTED = 256  # prompts that are sorted by length together: rows that run at once are then of like length
_END = 24  # tokens that tell prompts apart
_MARK = "a-turn-that-is-to-be-written"


class Document(NamedTuple):
    """A prompt and the target's answer to it, as tokens."""

    prompt: list[int]
    answer: list[int]

    @property
    def asked(self) -> tuple[int, ...]:
        """The end of the prompt, which tells it from others."""
        return end_of(self.prompt)


def end_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """The last tokens of a prompt, which identify it even where its beginning was cut off."""
    return tuple(prompt[-_END:])


def text_file(fingerprint: str, weights: str) -> Path:
    """Where the own text of this target is kept."""
    return cache_root() / "texts" / f"{fingerprint}-{weights}.jsonl"


def read_documents(file: Path, vocab_size: int = 2**31) -> list[Document]:
    """What is there; a line that was cut or damaged, or holds what is no token, is left out."""
    documents = []
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        try:
            record = json.loads(line)
            prompt, answer = (_tokens(record[name], vocab_size) for name in Document._fields)
            documents.append(Document(prompt, answer))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return documents


def _tokens(given: Any, vocab_size: int) -> list[int]:
    tokens = check_tokens("a line", given)
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError("tokens that the vocabulary lacks")
    return tokens


class OwnText:
    """Writes a target's own text to ``file``: answers to ``prompts`` first, then to what the model asks itself."""

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer, prompts: Sequence[list[int]], file: Path) -> None:
        self._loaded, self._tokenizer, self._prompts, self._file = loaded, tokenizer, prompts, file
        self.waited = 0.0  # seconds, for another process to end its writing
        self._most = min(ANSWER, max(1, loaded.max_context // 2))  # tokens of an answer
        self._ends = end_tokens(str(Source.find(loaded.name).folder), loaded.outline.eos, tokenizer)

    def write(self, budget: Budget, spent: Path, phase: Callable[[str], Callable[[float], None]]) -> list[Document]:
        """Write until the budget is used up; returns all that was ever written.

        Every text is on disk when it is finished, and ``spent`` says how much time they took: an interrupted
        calibration goes on from there.
        """
        seconds = seconds_spent(spent)
        documents = self._read()
        if budget.share(_size(documents), seconds) >= 1.0:
            return documents
        came = perf_counter()
        with locked(self._file.with_suffix(".lock"), f"writing {shown(self._file)}", wait=tell):
            self.waited = perf_counter() - came
            documents = self._read()
            if budget.share(_size(documents), seconds) >= 1.0:
                return documents
            return self._write(documents, budget, seconds, spent, phase("letting the target write text of its own"))

    def _read(self) -> list[Document]:
        return read_documents(self._file, self._loaded.vocab_size)

    def _write(
        self,
        documents: list[Document],
        budget: Budget,
        seconds: float,
        spent: Path,
        report: Callable[[float], None],
    ) -> list[Document]:
        """Add to ``documents``. Nobody else writes meanwhile: two would answer the same prompts."""
        is_cut = self._file.exists() and not self._file.read_bytes().endswith(b"\n")
        began = monotonic() - seconds

        def used() -> float:
            return budget.share(_size(documents), monotonic() - began)

        def is_late() -> bool:
            return budget.is_late(monotonic() - began)

        def at_once(token_seconds: float) -> float:
            return budget.seconds_left(monotonic() - began) / (token_seconds * self._most)

        _append(self._file, "\n" if is_cut else "")  # what an interruption has cut stays a line by itself
        with one_thread() if is_native() else nullcontext(), own_attention(self._loaded.model, SIDE_BY_SIDE):
            for answered in self._answered(documents, lambda: used() >= 1.0, is_late, at_once):
                _append(self._file, "".join(json.dumps(document._asdict()) + "\n" for document in answered))
                documents += answered
                write_atomic(spent, str(monotonic() - began).encode())
                report(used())
        write_atomic(spent, str(monotonic() - began).encode())
        return documents

    def _answered(
        self,
        documents: Sequence[Document],
        is_enough: Callable[[], bool],
        is_late: Callable[[], bool],
        at_once: Callable[[float], float],
    ) -> Iterator[list[Document]]:
        """What is finished, pass by pass; nothing is begun once it ``is_enough``.

        Nothing goes on when it ``is_late``: a pass of a large model takes seconds, and an answer hundreds of passes. So
        no more are begun ``at_once`` than come to their ends in time.
        """
        longest = max(1, min(_LONGEST_PROMPT, self._loaded.max_context - self._most))
        capacity = min(longest + self._most, self._loaded.max_context)
        writer = RowWriter(self._loaded, self._ends, capacity, seed=len(documents))
        given = (
            Task(prompt, self._most)
            for number, prompt in enumerate(self._unanswered(documents, longest))
            if number < ROWS or not is_enough()  # however little time there is
        )
        for finished in writer.write(given, is_late, at_once):
            yield self._told(finished)
        asked: deque[Task] = deque()
        for finished in writer.write(self._own_tasks(asked, is_enough), is_late, at_once):
            asked += (Task(self._asked(text)[-longest:], self._most) for text in finished if text.task.is_drawn)
            if answered := self._told(finished):
                yield answered

    def _unanswered(self, documents: Sequence[Document], longest: int) -> Iterator[list[int]]:
        """The prompts given that were not answered before, those of like length after each other."""
        answered = {tuple(document.prompt) for document in documents}
        prompts = [prompt[-longest:] for prompt in self._prompts if prompt]
        waiting = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if prompt not in answered]
        for start in range(0, len(waiting), _SORTED):
            yield from sorted(waiting[start : start + _SORTED], key=len)

    def _told(self, finished: Sequence[Written]) -> list[Document]:
        """The answers among them, without those of which next to nothing was written when time was up."""
        return [
            Document(text.task.prompt, text.tokens)
            for text in finished
            if not text.task.is_drawn and (len(text.tokens) >= min(_LEAST, self._most) or text.tokens[-1] in self._ends)
        ]

    def _own_tasks(self, asked: deque[Task], is_enough: Callable[[], bool]) -> Iterator[Task]:
        """What the model has ``asked`` itself, and as long as nothing waits more to ask."""
        opening = Task(self._opening, min(OPENING, self._loaded.max_context // 2), is_drawn=True)
        while not is_enough():
            yield asked.popleft() if asked else opening

    @cached_property
    def _is_chat(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    @cached_property
    def _opening(self) -> list[int]:
        return _bare_turn(self._tokenizer) if self._is_chat else [next(iter(self._ends), 0)]

    def _asked(self, text: Written) -> list[int]:
        """The prompt that the model wrote: as a user's turn if it has a chat template, else its first tokens."""
        if not self._is_chat:
            return text.task.prompt + text.tokens
        turn = str(self._tokenizer.decode(text.tokens, skip_special_tokens=True)).strip()
        return encode_chat(self._tokenizer, [{"role": "user", "content": turn}]) if turn else self._opening


def _append(file: Path, text: str) -> None:
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(text)
    except OSError as error:
        raise cannot_write(file, error) from error


def seconds_spent(file: Path) -> float:
    """How long text was written by what ``file`` says; none where it is damaged or not there."""
    return read_or_drop(file, _seconds) or 0.0


def _seconds(file: Path) -> float:
    seconds = float(file.read_text())
    if not 0.0 <= seconds < inf:
        raise ValueError("no time that anything took")
    return seconds


def _size(documents: Sequence[Document]) -> int:
    return sum(len(document.answer) for document in documents)


def _bare_turn(tokenizer: Tokenizer) -> list[int]:
    """The chat template up to where a user's first words stand."""
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    return tokenizer.encode(text.partition(_MARK)[0], add_special_tokens=False)
