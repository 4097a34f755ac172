"""A head's draft vocabulary: the most frequent tokens of the target's own text (FR-Spec, arXiv 2502.14856).

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
DRAFT_VOCABULARY = 8192  # maximum tokens; the LM head is most of what a small head reads per pass
_PROMPT_WEIGHT = 0.25  # weight of a prompt's token; an answer's weighs 1. The target did not write prompts

# A prompt and the target's answer to it.
Text = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A subset of the target's tokens, in ascending order. An empty or unordered subset raises ValueError."""

    tokens: Tensor  # [Vd] int64

    def __post_init__(self) -> None:
        if not len(self.tokens) or int(self.tokens[0]) < 0 or bool((self.tokens.diff() < 1).any()):
            raise ValueError("a vocabulary holds no tokens, or not in ascending order")

    @classmethod
    def whole(cls, vocab_size: int) -> "Vocabulary":
        """Return the draft vocabulary of all ``vocab_size`` tokens."""
        return cls(torch.arange(vocab_size))

    @classmethod
    def of(cls, texts: Iterable[Text], vocab_size: int, most: int = DRAFT_VOCABULARY) -> "Vocabulary":
        """Return the ``most`` most frequent tokens of ``texts``, or all tokens if ``vocab_size`` is at most ``most``.

        A prompt's token counts a quarter of an answer's. Ties go to the smaller token id, since tokenizers mostly
        number tokens by frequency.

        Args:
            texts: pairs (token ids of the prompt, token ids of the answer).
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
        """Return the share of the answers' tokens, repeated ones included, that the vocabulary has; 0 without answers.

        Args:
            texts: pairs (token ids of the prompt, token ids of the answer).
        """
        known = set(self.tokens.tolist())
        tokens = [token for _, answer in texts for token in answer]
        return sum(token in known for token in tokens) / max(len(tokens), 1)

    def save(self, path: Path) -> None:
        """Write the vocabulary as a safetensors file at ``path``, replacing an existing file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        write_tensors(path, KIND, SCHEMA_VERSION, {"tokens": self.tokens})

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read a vocabulary from the safetensors file ``path``.

        Raises:
            ArtifactError: the file is missing, damaged or of another kind.
        """
        arrays = read_tensors(path, KIND, SCHEMA_VERSION)
        tokens = arrays.get("tokens")
        if tokens is None or tokens.ndim != 1 or tokens.dtype.kind != "i":
            raise ArtifactError(f"{path} is not a vocabulary; calibrate again")
        try:
            return cls(torch.from_numpy(tokens).to(torch.int64))
        except ValueError as error:
            raise ArtifactError(f"{path} is damaged ({error}); calibrate again") from error
