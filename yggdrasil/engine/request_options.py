"""Options of one request, and their checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, OFF, Speculation
from yggdrasil.arguments import check_flag, check_integer, check_texts, check_tokens
from yggdrasil.errors import ArgumentTypeError, ContextFull, YggdrasilError

if TYPE_CHECKING:  # imports torch, which checking options must not
    from yggdrasil.engine.trace import Watch


class RequestOptions(TypedDict, total=False):
    """Keyword options of a decoder's ``generate``, ``stream``, ``chat``, ``stream_chat`` and ``start``.

    ``RequestSettings`` has the defaults.
    """

    max_new_tokens: int
    stop: str | Sequence[str] | None  # texts before which the answer ends; they may include special tokens
    include_stop: bool  # include the stop text in the answer
    ignore_eos: bool  # continue after the model's end tokens
    speculation: bool | Speculation  # False decodes plainly, True takes the default settings
    sampling: SamplingParams
    watch: "Watch | None"  # called with each iteration's tree, in the decoding thread
    wait: bool  # wait for another thread's request on this decoder, instead of raising
    begins_turn: bool  # the text is a chat's answer, not a continuation of the prompt's text
    keeps_special: bool  # keep special tokens in the text
    stop_tokens: Sequence[int]  # further end tokens, which are not in the text


@dataclass(frozen=True)
class RequestSettings:
    """Checked options of one request, with defaults. ``RequestOptions`` explains the fields.

    Raises:
        YggdrasilError: an option is invalid. The error is also a ``TypeError`` or ``ValueError``.
    """

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    speculation: Speculation = DEFAULT
    sampling: SamplingParams = GREEDY
    watch: "Watch | None" = None
    wait: bool = False
    begins_turn: bool = False
    keeps_special: bool = False
    stop_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RequestSettings":
        """Return the checked settings for a caller's keyword arguments, which ``RequestOptions`` lists.

        ``speculation`` may also be True (the default) or False (off).

        Raises:
            YggdrasilError: an option is unknown or invalid. The error is also a ``TypeError`` or ``ValueError``.
        """
        names = [field.name for field in fields(cls)]
        unknown = next((name for name in options if name not in names), None)
        if unknown is not None:
            is_sampling = unknown in (field.name for field in fields(SamplingParams))
            mend = f"give sampling=SamplingParams({unknown}=...)" if is_sampling else f"there are {', '.join(names)}"
            raise ArgumentTypeError(f"there is no option {unknown}; {mend}")
        speculation = options.get("speculation", DEFAULT)
        if isinstance(speculation, bool):
            speculation = DEFAULT if speculation else OFF
        return cls(**{**options, "speculation": speculation})

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 1, rule="at least 1")
        object.__setattr__(self, "stop", check_texts("stop", self.stop))
        object.__setattr__(self, "stop_tokens", tuple(check_tokens("stop_tokens", self.stop_tokens)))
        for name in ("include_stop", "ignore_eos", "wait", "begins_turn", "keeps_special"):
            check_flag(name, getattr(self, name))
        if self.watch is not None and not callable(self.watch):
            raise ArgumentTypeError(f"watch is {self.watch!r}; it must be a function")
        for name, kind in (("speculation", Speculation), ("sampling", SamplingParams)):
            if not isinstance(getattr(self, name), kind):
                raise ArgumentTypeError(f"{name} is {getattr(self, name)!r}; it must be a {kind.__name__} object")


def check_prompt_tokens(tokens: Sequence[int], limit: int, vocab_size: int) -> None:
    """Check the token ids of a prompt.

    Args:
        limit: context length in tokens.
        vocab_size: size of the target's vocabulary.

    Raises:
        ContextFull: the prompt has ``limit`` tokens or more.
        YggdrasilError: the prompt is empty, or has an id outside the vocabulary.
    """
    if not tokens:
        raise YggdrasilError("the prompt is empty; give at least one token of text")
    if len(tokens) >= limit:
        raise ContextFull(
            f"the prompt has {len(tokens)} tokens, the context holds {limit}; shorten the prompt, or decode with "
            "a larger max_length (--max-length) if the model allows it"
        )
    check_vocabulary("the prompt", tokens, vocab_size)


def check_vocabulary(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise YggdrasilError, which begins with ``name``, if an id of ``tokens`` is outside 0 .. ``vocab_size`` - 1."""
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise YggdrasilError(f"{name} holds token {wrong}, the vocabulary ends at {vocab_size - 1}")


def near_tie_tolerance(speculation: Speculation, measured: float | None) -> float:
    """Return the difference of the two best logits below which a decision is a near tie; 0 if near ties do not matter.

    ``speculation.tolerance`` takes precedence over ``measured``, the tolerance that ``yggdrasil parity`` measured for
    the models on this machine (None if it was not measured).

    Raises:
        YggdrasilError: near ties matter (exactness "strict", or an audit), and there is no tolerance.
    """
    if speculation.exactness != "strict" and not speculation.audit:
        return 0.0
    tolerance = measured if speculation.tolerance is None else speculation.tolerance
    if tolerance is None:
        raise YggdrasilError(
            "exactness strict and audit need the tolerance of this pair on this machine; measure it with "
            "`yggdrasil parity`, or give one"
        )
    return tolerance
