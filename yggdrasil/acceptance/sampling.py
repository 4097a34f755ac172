"""Sampling parameters and constraints of a request, with transformers' semantics. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from yggdrasil.arguments import check_integer, check_name, check_number, check_text, check_tokens, keep_plain_numbers
from yggdrasil.errors import ArgumentTypeError, ArgumentValueError, first_line

ConstraintKind = Literal["json_schema", "regex", "grammar"]
MAX_TOP_LOGPROBS = 100
# Beyond these limits, float32 scores overflow or lose all precision.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
MAX_FACTOR, MAX_SHIFT = 1e3, 1e4
_TEMPERATURES = f"0 (greedy), or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"


@dataclass(frozen=True)
class Constraint:
    """A format that the generated text must match.

    ``text`` is a JSON schema (as JSON text, dict or bool), a regular expression, or a Lark or GBNF grammar.

    Raises:
        YggdrasilError: the kind is unknown, or the text is empty or no text. ``GrammarCompiler`` checks the syntax.
    """

    kind: ConstraintKind
    text: str
    title: str = ""  # name in error messages; ``kind`` if empty

    @property
    def name(self) -> str:
        """Name of the constraint in error messages."""
        return self.title or self.kind

    def __post_init__(self) -> None:
        check_name("a constraint's kind", self.kind, get_args(ConstraintKind))
        check_text("a constraint's title", self.title)
        if self.kind == "json_schema" and isinstance(self.text, dict | bool):
            object.__setattr__(self, "text", _dumped(self.text))
        if not check_text(f"the {self.kind}", self.text):
            raise ArgumentValueError(f"the {self.kind} is empty; leave it out, or say what the text must match")


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"the json_schema cannot be written as JSON: {first_line(error)}") from error


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. The defaults decode greedily without logits processors.

    Args:
        temperature: 0 is greedy; ``top_k`` to ``typical_p`` then have no effect.
        repetition_penalty: counts tokens of prompt and output, as transformers does.
        presence_penalty, frequency_penalty: count generated tokens only, as the OpenAI API does.
        bad_words: texts or token sequences that must not occur in the output.
        seed: 0 to 2**64 - 1; None takes a random one.
        logits_processors: transformers' ``LogitsProcessor`` objects: functions of prefix [1, L] and scores [1, V],
            without state.
        logprobs: how many top log-probabilities to report beside each token's own, 0 to 100; None reports none.

    Raises:
        YggdrasilError: a value is out of range or has a wrong type.
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
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, MAX_TEMPERATURE, rule=_TEMPERATURES)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ArgumentValueError(f"temperature is {self.temperature!r}; it must be {_TEMPERATURES}")
        check_integer("top_k", self.top_k, 0, rule="at least 0 (0: off)")
        for name in ("top_p", "typical_p"):
            check_number(name, getattr(self, name), 0, 1, rule="above 0 and at most 1", is_open=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 1 / MAX_FACTOR, MAX_FACTOR)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -MAX_SHIFT, MAX_SHIFT)
        check_integer("min_new_tokens", self.min_new_tokens, 0)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1, rule="between 0 and 2**64 - 1")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise ArgumentTypeError(f"constraint is {self.constraint!r}; it must be a Constraint")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        if not isinstance(self.logits_processors, Sequence) or not all(map(callable, self.logits_processors)):
            raise ArgumentTypeError("logits_processors must be a list of transformers' LogitsProcessor objects")
        keep_plain_numbers(self)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the argmax (the first of equals) and not drawn: temperature 0 or top_k 1."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_logits(self) -> bool:
        """Whether choosing a token needs more than the argmax of the target's raw logits.

        It is False only for greedy decoding without ``logprobs`` and without anything that changes the logits:
        penalties, biases, bad words, a minimum length, logits processors, a constraint.
        """
        return self.identity() != GREEDY.identity() or self.logprobs is not None

    def identity(self) -> tuple[object, ...]:
        """Return a hashable key of all parameters, except the seed, that change the output distribution.

        Acceptance statistics are kept separately for each key.
        """
        bias = tuple(sorted(self.logit_bias.items()))
        processors = tuple(id(processor) for processor in self.logits_processors)
        drawn = (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return (
            (0.0,) if self.is_greedy else drawn, self.repetition_penalty, self.presence_penalty,
            self.frequency_penalty, bias, self.bad_words, self.min_new_tokens, processors, self.constraint,
        )  # fmt: skip


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ArgumentTypeError(f"logit_bias is {biases!r}; it must map token numbers to biases")
    return {
        check_integer("a token of logit_bias", token, 0): check_number(
            f"logit_bias of token {token}", bias, -MAX_SHIFT, MAX_SHIFT
        )
        for token, bias in biases.items()
    }


def _words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return ``words`` as a tuple of non-empty strings and token tuples; a single string is one item."""
    if isinstance(words, str):
        words = (words,)
    if isinstance(words, bytes | Mapping) or not isinstance(words, Sequence):
        raise ArgumentTypeError(f"bad_words is {words!r}; it must be a list of texts or token sequences")
    if not all(len(word) if isinstance(word, Sequence) else True for word in words):
        raise ArgumentValueError(f"bad_words is {words!r}; it must be words that are not empty")
    return tuple(
        check_text("bad_words", word) if isinstance(word, str) else tuple(check_tokens("an item of bad_words", word))
        for word in words
    )


GREEDY = SamplingParams()
