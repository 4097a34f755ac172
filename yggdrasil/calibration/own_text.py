"""The target's own text: its greedy answers to prompts, kept in the user's cache and added to by later calibrations.

Prompts are the user's; when those are answered, a chat model writes users' turns itself, from its bare template (as in
arXiv 2406.08464), and another model goes on from openings that it draws itself. Answers are greedy, in batches, through
the model's own attention: nothing of it needs to be exact, since it only teaches what is likely.

Dims: B texts of a batch.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from yggdrasil.arguments import check_tokens
from yggdrasil.artifacts import write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.calibration.settings import Budget
from yggdrasil.calibration.work import read_or_drop
from yggdrasil.engine.ends import end_tokens
from yggdrasil.models.attention import own_attention
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.source import Source
from yggdrasil.prompts import encode_chat

BATCH = 32
ANSWER, OPENING = 128, 96  # tokens at most: of an answer, and of what the model opens with itself
_LONGEST_PROMPT = 512  # tokens kept of a prompt, the last ones
_SORTED = 8  # batches whose prompts are sorted by length together, so that little is padded
_MARK = "a-turn-that-is-to-be-written"


class Document(NamedTuple):
    """A prompt and the target's answer to it, as tokens."""

    prompt: list[int]
    answer: list[int]


def text_file(target: str) -> Path:
    """Where the own text of the target with this fingerprint (and weights) is kept."""
    return cache_root() / "texts" / f"{target}.jsonl"


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

    def __init__(
        self, loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], file: Path
    ) -> None:
        self._loaded, self._tokenizer, self._prompts, self._file = loaded, tokenizer, prompts, file
        self._ends = end_tokens(str(Source.find(loaded.name).folder), loaded.outline.eos, tokenizer)

    def write(self, budget: Budget, spent: Path, phase: Callable[[str], Callable[[float], None]]) -> list[Document]:
        """Write until the budget is used up; returns all that was ever written.

        Every batch is on disk when the next begins, and ``spent`` says how much time they took: an interrupted
        calibration goes on from there.
        """
        documents = read_documents(self._file, self._loaded.vocab_size)
        seconds = read_or_drop(spent, _seconds) or 0.0
        if budget.share(_size(documents), seconds) >= 1.0:
            return documents
        report = phase("letting the target write text of its own")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        is_cut = self._file.exists() and not self._file.read_bytes().endswith(b"\n")
        began = monotonic() - seconds
        with own_attention(self._loaded.model), self._file.open("a", encoding="utf-8") as lines:
            lines.write("\n" if is_cut else "")  # what an interruption has cut stays a line by itself
            for batch in self._batches(documents):
                for document in self._answered(batch):
                    lines.write(json.dumps(document._asdict()) + "\n")
                    documents.append(document)
                lines.flush()
                seconds = monotonic() - began
                write_atomic(spent, str(seconds).encode())
                report(budget.share(_size(documents), seconds))
                if budget.share(_size(documents), seconds) >= 1.0:
                    break
        return documents

    def _batches(self, documents: Sequence[Document]) -> Iterator[list[list[int]]]:
        """Prompts to answer, without end: those given that were not answered before, then the model's own."""
        answered, seed = {tuple(document.prompt) for document in documents}, len(documents)
        prompts = [prompt[-_LONGEST_PROMPT:] for prompt in self._prompts if prompt]
        waiting = [prompt for prompt in prompts if tuple(prompt) not in answered]
        for start in range(0, len(waiting), _SORTED * BATCH):
            group = sorted(waiting[start : start + _SORTED * BATCH], key=len)
            yield from (group[i : i + BATCH] for i in range(0, len(group), BATCH))
        while True:
            seed += BATCH
            yield self._self_written(seed)

    def _self_written(self, seed: int) -> list[list[int]]:
        """Prompts that the model draws: users' turns where it has a chat template, else openings."""
        torch.manual_seed(seed)
        is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        opening = _bare_turn(self._tokenizer) if is_chat else [next(iter(self._ends), 0)]
        drawn = self._generate([opening] * BATCH, OPENING, do_sample=True)
        if not is_chat:
            return [opening + tokens for tokens in drawn]
        turns = [str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in drawn]
        return [encode_chat(self._tokenizer, [{"role": "user", "content": turn}]) for turn in turns if turn] or [
            opening
        ]

    def _answered(self, prompts: list[list[int]]) -> list[Document]:
        answers = self._generate(prompts, ANSWER, do_sample=False)
        return [Document(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], most: int, *, do_sample: bool) -> list[list[int]]:
        """Continuations of ``prompts``, each up to its end token; padded on the left to one length."""
        longest, filler = max(map(len, prompts)), next(iter(self._ends), 0)
        tokens = torch.full((len(prompts), longest), filler)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        model: Any = self._loaded.model
        device = self._loaded.device
        given = model.generate(
            tokens.to(device), attention_mask=mask.to(device), max_new_tokens=most, do_sample=do_sample,
            eos_token_id=sorted(self._ends) or None, pad_token_id=filler,
        )  # fmt: skip
        return [self._up_to_end(row) for row in given[:, longest:].tolist()]

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[:end]


def _seconds(file: Path) -> float:
    seconds = float(file.read_text())
    if not 0.0 <= seconds < inf:
        raise ValueError("no time that anything took")
    return seconds


def _size(documents: Sequence[Document]) -> int:
    return sum(len(document.answer) for document in documents)


def _bare_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The chat template up to where a user's first words stand."""
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    return list(tokenizer(text.partition(_MARK)[0], add_special_tokens=False)["input_ids"])
