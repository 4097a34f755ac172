"""The target's own text: greedy answers to prompts, stored in the user's cache and extended by later calibrations.

The prompts are the user's. When all are answered, the target samples further prompts: a chat model samples user turns
from its bare template (as in arXiv 2406.08464), a base model samples openings of texts. Answers are generated in
batches: they need not be bit-exact, since they only serve as statistics.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import cycle
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from yggdrasil.arguments import check_tokens
from yggdrasil.artifacts import shown, write_atomic
from yggdrasil.artifacts.atomic import cannot_write
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.calibration.calibration_settings import TextBudget
from yggdrasil.calibration.row_writer import ROWS, RowWriter, Task, Written
from yggdrasil.calibration.work_folder import read_or_drop
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.engine.end_tokens import end_tokens
from yggdrasil.native import is_native
from yggdrasil.native.one_thread import one_thread
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.side_by_side import SIDE_BY_SIDE

ANSWER, OPENING = 256, 96  # maximum tokens of an answer, and of the sampled part of a prompt
_LEAST = 16  # minimum tokens of an answer that was cut because the time was up
_LONGEST_PROMPT = 512  # a longer prompt is cut to so many last tokens
_SORTED = 256  # prompts that are sorted by length together, so that rows of a batch have similar lengths
_OPENING_TOKENS = 2  # tokens of a given user turn with which a sampled prompt begins
_END = 24  # last tokens by which prompts are compared
_MARK = "a-turn-that-is-to-be-written"


class Document(NamedTuple):
    """A prompt and the target's answer to it, as token ids."""

    prompt: list[int]
    answer: list[int]

    @property
    def prompt_key(self) -> tuple[int, ...]:
        """The last 24 tokens of the prompt, which identify the prompt."""
        return prompt_key(self.prompt)


def prompt_key(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the last 24 tokens of a prompt, which identify the prompt even if its beginning was cut off."""
    return tuple(prompt[-_END:])


def text_file(fingerprint: str, weights: str) -> Path:
    """Return the path of the file in the user's cache with a target's generated text. The file may not exist.

    Args:
        fingerprint: fingerprint of the target's checkpoint.
        weights: the weight format with which the text was generated, see ``Weights``.
    """
    return cache_root() / "texts" / f"{fingerprint}-{weights}.jsonl"


def read_documents(file: Path, vocab_size: int = 2**31) -> list[Document]:
    """Load a target's generated text, prompts with answers, in the order of the file.

    Damaged lines and lines with invalid token ids are skipped.

    Args:
        file: JSON lines with the fields prompt and answer, token ids. A missing file has no documents.
        vocab_size: token ids must be below this.
    """
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
    """Generates a target's text into ``file``: answers to ``prompts``, then to prompts that the target samples."""

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer, prompts: Sequence[list[int]], file: Path) -> None:
        self._loaded, self._tokenizer, self._prompts, self._file = loaded, tokenizer, prompts, file
        self.waited = 0.0  # seconds spent waiting for another process that writes the file
        self._most = min(ANSWER, max(1, loaded.max_context // 2))  # maximum tokens of an answer
        self._ends = end_tokens(str(Source.find(loaded.name).folder), loaded.sizes.eos, tokenizer)

    def write(self, budget: TextBudget, spent: Path, phase: Callable[[str], Callable[[float], None]]) -> list[Document]:
        """Generate text of the target until the budget is used up, and return all documents of the file.

        Each answer is written to disk when it is finished. The call waits while another process writes the same file.

        Args:
            budget: limit of seconds and of tokens in the file.
            spent: file that records the seconds of this calibration, so that an interrupted one resumes its budget.
            phase: begins a phase of progress by a title, and returns a function that takes the fraction done.
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
            return self._write(documents, budget, seconds, spent, phase("generating text of the target"))

    def _read(self) -> list[Document]:
        return read_documents(self._file, self._loaded.vocab_size)

    def _write(
        self,
        documents: list[Document],
        budget: TextBudget,
        seconds: float,
        spent: Path,
        report: Callable[[float], None],
    ) -> list[Document]:
        """Generate answers and append them to ``documents`` and the file, which the caller has locked."""
        is_cut = self._file.exists() and not self._file.read_bytes().endswith(b"\n")
        began = monotonic() - seconds

        def used() -> float:
            return budget.share(_size(documents), monotonic() - began)

        def is_late() -> bool:
            return budget.is_late(monotonic() - began)

        def at_once(token_seconds: float) -> float:
            return budget.seconds_left(monotonic() - began) / (token_seconds * self._most)

        _append(self._file, "\n" if is_cut else "")  # a line cut by an interruption stays separate
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
        """Yield finished answers after each pass.

        After the first ``ROWS`` given prompts, no answer begins once ``is_enough()`` returns True. All answers stop
        once ``is_late()`` returns True. ``at_once`` maps the seconds per token to the number of answers that can be
        generated together and finish in time: with a large model a pass takes seconds, and an answer takes hundreds of
        passes.
        """
        longest = max(1, min(_LONGEST_PROMPT, self._loaded.max_context - self._most))
        capacity = min(longest + self._most, self._loaded.max_context)
        writer = RowWriter(self._loaded, self._ends, capacity, seed=len(documents))
        given = (
            Task(prompt, self._most)
            for number, prompt in enumerate(self._unanswered(documents, longest))
            if number < ROWS or not is_enough()  # at least one batch, however short the time
        )
        for tasks in (given, self._own_tasks(is_enough)):
            yield from map(self._documents_of, writer.write(tasks, is_late, at_once))

    def _unanswered(self, documents: Sequence[Document], longest: int) -> Iterator[list[int]]:
        """Yield the given prompts without an answer, prompts of similar length after each other."""
        answered = {tuple(document.prompt) for document in documents}
        prompts = [prompt[-longest:] for prompt in self._prompts if prompt]
        waiting = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if prompt not in answered]
        for start in range(0, len(waiting), _SORTED):
            yield from sorted(waiting[start : start + _SORTED], key=len)

    def _documents_of(self, finished: Sequence[Written]) -> list[Document]:
        """Return the finished texts without those whose answer was cut to fewer than ``_LEAST`` tokens."""
        return [
            Document(text.prompt, text.tokens)
            for text in finished
            if text.tokens and (len(text.tokens) >= min(_LEAST, self._most) or text.last in self._ends)
        ]

    def _own_tasks(self, is_enough: Callable[[], bool]) -> Iterator[Task]:
        """Yield tasks that sample a prompt and answer it, until ``is_enough()`` returns True."""
        most = max(1, min(OPENING, self._loaded.max_context // 4))
        for opening in cycle(self._openings()):
            if is_enough():
                return
            yield Task(opening, self._most, most, self._template[1])

    @cached_property
    def _is_chat(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    @cached_property
    def _template(self) -> tuple[list[int], tuple[int, ...]]:
        """The chat template's tokens before and after a user's text; without a template an end token and no tokens."""
        if not self._is_chat:
            return [next(iter(self._ends), 0)], ()
        turn = [{"role": "user", "content": _MARK}]
        text = str(self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        before, _, after = text.partition(_MARK)
        start, end = (self._tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        return start, tuple(end)

    def _openings(self) -> list[list[int]]:
        """Return the token ids with which sampled prompts begin.

        They are the template's tokens before a user's text, and these tokens with the first two tokens of each given
        user turn: from the template's tokens alone, a model for code samples only questions about code.
        """
        start, size = self._template[0], len(self._template[0])
        turns = [prompt for prompt in self._prompts if self._is_chat and prompt[:size] == start]
        given = (prompt[: size + _OPENING_TOKENS] for prompt in turns if len(prompt) > size + _OPENING_TOKENS)
        return [start, *map(list, dict.fromkeys(map(tuple, given)))]


def _append(file: Path, text: str) -> None:
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(text)
    except OSError as error:
        raise cannot_write(file, error) from error


def seconds_spent(file: Path) -> float:
    """Return the seconds of generating text that ``file`` records; 0 if the file is missing or damaged.

    A damaged file is deleted.

    Raises:
        YggdrasilError: the file exists, and the system cannot read it.
    """
    return read_or_drop(file, _seconds) or 0.0


def _seconds(file: Path) -> float:
    seconds = float(file.read_text())
    if not 0.0 <= seconds < inf:
        raise ValueError("no time that anything took")
    return seconds


def _size(documents: Sequence[Document]) -> int:
    return sum(len(document.answer) for document in documents)
