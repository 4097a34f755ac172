"""Options of model-free drafters, as stored in plans. Imports no torch."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class NGramOptions:
    """Options of the n-gram drafter, with the names and meanings of TensorRT-LLM's NGram.

    Only the default of ``is_public_pool`` differs: requests do not share their text.
    """

    max_draft_len: int = 8  # the most tokens of a candidate continuation
    max_matching_ngram_size: int = 3  # the most tokens of the suffix that is looked up
    is_keep_all: bool = True  # keep all candidates of an n-gram, else only the longest (the first of equals)
    is_use_oldest: bool = True  # prefer the oldest candidate, else the newest; only used with is_keep_all
    is_public_pool: bool = False  # one pool for all requests, else one per request

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, got {value}"
            for name, value in (
                ("max_draft_len", self.max_draft_len),
                ("max_matching_ngram_size", self.max_matching_ngram_size),
            )
            if value < 1
        ]
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True)
class StatisticsOptions:
    """Options of the n-gram statistics: counts of the request's text, a static ``table``, and token ``recycling``.

    Recycling adds the target's most recent top-k tokens after a token as candidates.
    """

    text: bool = True
    table: bool = True
    recycling: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text must be true: nothing is counted without it")


@dataclass(frozen=True)
class LookaheadOptions:
    """Options of lookahead decoding, with TensorRT-LLM's names."""

    max_window_size: int = 4  # columns of the window
    max_ngram_size: int = 3  # tokens of an n-gram; the window has one level fewer
    max_verification_set_size: int = 4  # the most n-grams verified per pass

    def __post_init__(self) -> None:
        least = {"max_window_size": 1, "max_ngram_size": 2, "max_verification_set_size": 1}
        faults = [
            f"{name} must be at least {value}, got {getattr(self, name)}"
            for name, value in least.items()
            if getattr(self, name) < value
        ]
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True)
class ClassOptions:
    """A model-free drafter without options: a registered name, or ``module:Class`` of a user's drafter."""

    drafter: str


ModelFreeOptions: TypeAlias = (
    NGramOptions | StatisticsOptions | LookaheadOptions | ClassOptions
)  # of model-free drafters
