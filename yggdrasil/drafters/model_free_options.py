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
    """Options of the n-gram statistics: counts of the request's text, and a static ``table``."""

    text: bool = True  # count the request's text; must be True
    table: bool = True  # also draft from a static n-gram table

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text must be true: nothing is counted without it")


@dataclass(frozen=True)
class ClassOptions:
    """A user's model-free drafter, by its name ``module:Class``."""

    drafter: str


ModelFreeOptions: TypeAlias = NGramOptions | StatisticsOptions | ClassOptions  # options of any model-free drafter
