"""What law the tokens of a request follow: the usual parameters, with transformers' meaning of each.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from yggdrasil.errors import YggdrasilError

ConstraintKind = Literal["json_schema", "regex", "grammar"]
MAX_TOP_LOGPROBS = 100


@dataclass(frozen=True)
class Constraint:
    """What the text must match: a JSON schema (JSON text), a regular expression, or a Lark or GBNF grammar."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. The defaults are greedy decoding without any processor.

    ``temperature`` 0 is greedy: the truncations (``top_k`` to ``typical_p``) then do nothing. Penalties follow the
    OpenAI API (they count generated tokens only), ``repetition_penalty`` transformers (prompt included).
    ``bad_words`` are texts, or token sequences. ``logits_processors`` are the caller's own transformers
    ``LogitsProcessor`` objects; they must be functions of (prefix, scores) alone.

    Raises:
        YggdrasilError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    seed: int | None = None
    logits_processors: Sequence[Any] = ()
    constraint: Constraint | None = None
    logprobs: int | None = None  # alternatives to report beside each token's own log-probability

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0: off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "a finite number"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "a finite number"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2**64 - 1"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
             f"between 0 and {MAX_TOP_LOGPROBS}"),
            ("bad_words", all(self.bad_words), "words that are not empty"),
        ):  # fmt: skip
            if not holds:
                raise YggdrasilError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken rather than drawn."""
        return self.temperature == 0

    @property
    def needs_logits(self) -> bool:
        """Whether the host must see rows of logits: for anything but greedy decoding of the bare model."""
        return self.identity() != GREEDY.identity() or self.logprobs is not None

    def identity(self) -> tuple[object, ...]:
        """What the law of the tokens depends on, seed aside: acceptance statistics are kept apart by it."""
        bias = tuple(sorted(self.logit_bias.items()))
        processors = tuple(id(processor) for processor in self.logits_processors)
        drawn = (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return (
            (0.0,) if self.is_greedy else drawn, self.repetition_penalty, self.presence_penalty,
            self.frequency_penalty, bias, self.bad_words, self.min_new_tokens, processors, self.constraint,
        )  # fmt: skip


GREEDY = SamplingParams()
