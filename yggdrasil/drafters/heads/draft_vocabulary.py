"""The tokens that a head drafts among: the most frequent ones of its target's own text (FR-Spec, arXiv 2502.14856).

Dims: Vd drafted tokens.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from yggdrasil.artifacts.store import read_tensors, write_tensors
from yggdrasil.errors import ArtifactError

KIND, SCHEMA_VERSION, FILE_NAME = "vocabulary", 1, "vocabulary.safetensors"
DRAFT_VOCABULARY = 8192  # tokens at most: the largest part of what a drafted row reads
_PROMPT_WEIGHT = 0.25  # of a prompt's token, where an answer's counts 1: others' text, but what chats are about

# A prompt and the target's answer to it.
Text = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens of a target, ascending."""

    tokens: Tensor  # [Vd] int64

    def __post_init__(self) -> None:
        if not len(self.tokens) or int(self.tokens[0]) < 0 or bool((self.tokens.diff() < 1).any()):
            raise ValueError("a vocabulary holds no tokens, or not in ascending order")

    @classmethod
    def whole(cls, vocab_size: int) -> "Vocabulary":
        """Every token."""
        return cls(torch.arange(vocab_size))

    @classmethod
    def of(cls, texts: Iterable[Text], vocab_size: int, most: int = DRAFT_VOCABULARY) -> "Vocabulary":
        """The ``most`` frequent tokens of ``texts``, every one of a vocabulary that is small.

        Of tokens that are as frequent those come first that a tokenizer has numbered first, as it mostly did by how
        frequent they were in its own text.
        """
        if vocab_size <= most:
            return cls.whole(vocab_size)
        counts: Counter[int] = Counter()
        for prompt, answer in texts:
            counts.update(answer)
            for token in prompt:
                counts[token] += _PROMPT_WEIGHT  # type: ignore[assignment]
        ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
        return cls(torch.tensor(sorted(ranked[:most])))

    def coverage(self, texts: Iterable[Text]) -> float:
        """The share of the answers' tokens that can be drafted; 0 where there are none."""
        known = set(self.tokens.tolist())
        tokens = [token for _, answer in texts for token in answer]
        return sum(token in known for token in tokens) / max(len(tokens), 1)

    def save(self, path: Path) -> None:
        """Write a safetensors artefact; ArtifactError where that fails."""
        write_tensors(path, KIND, SCHEMA_VERSION, {"tokens": self.tokens})

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read what ``save`` wrote; ArtifactError if the file is missing, damaged or something else."""
        arrays = read_tensors(path, KIND, SCHEMA_VERSION)
        tokens = arrays.get("tokens")
        if tokens is None or tokens.ndim != 1 or tokens.dtype.kind != "i":
            raise ArtifactError(f"{path} is not a vocabulary; calibrate again")
        try:
            return cls(torch.from_numpy(tokens).to(torch.int64))
        except ValueError as error:
            raise ArtifactError(f"{path} is damaged ({error}); calibrate again") from error
