"""Speculation settings of a request: acceptance rule, tree shape and exactness. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

from yggdrasil.arguments import check_flag, check_integer, check_name, check_number, check_tokens, keep_plain_numbers
from yggdrasil.errors import ArgumentValueError, YggdrasilError
from yggdrasil.own_class import own_class, own_object

RuleName = Literal["match", "leviathan", "specinfer", "sequoia", "typical", "relaxed", "off"]
Exactness = Literal["fast", "strict", "fixed-width"]
LOSSY_RULES: tuple[RuleName, ...] = ("typical", "relaxed")
MAX_LEAD = 1e9  # logits, an upper limit for tolerances


class OwnRule(Protocol):
    """Interface of a user-defined acceptance rule; ``docs/sampling.md`` has an example."""

    name: str
    is_lossless: bool  # whether outputs follow the target's distribution

    def walk(self, tree: Any, sampler: Any) -> Any:
        """Accept a path of ``tree`` from its root on, choose the token after it, and commit all these tokens.

        The rule calls ``sampler.push`` with every token of the result, in order, and with the logits from which the
        token was chosen. The root's token has been committed before. The walk stops after the first token that no child
        of the last accepted row holds (the bonus token), or after an end token. The method returns an
        ``acceptance.rules.Walk`` with as many tokens as rows, of which the first is the root's (0).
        """


@dataclass(frozen=True)
class Speculation:
    """Speculation settings of one request.

    Acceptance rules (all but ``typical`` and ``relaxed`` preserve the target's output distribution):

    - ``match``: sample from the target, and descend while a child holds the sampled token; for any fixed tree.
    - ``leviathan``, ``specinfer``, ``sequoia``: accept candidates drawn from the draft model with probability
      min(1, p / q): one per node, several with replacement, several without replacement.
    - ``typical`` (Medusa): accept tokens whose probability exceeds a threshold that falls with the entropy. Lossy.
    - ``relaxed`` (TensorRT-LLM): accept tokens in the top ``relaxed_topk`` and within ``relaxed_delta`` of the highest
      log-probability; with ``thinking_only``, only between ``<think>`` and ``</think>``. Lossy.
    - ``off``: no drafting.
    - an object: a user-defined rule (``OwnRule``), for the plan's trees or those of ``expansion``.

    ``expansion`` is the number of children per node, level by level: a k-ary tree for ``match``, the number of draws
    for rules that draw. Without it, ``match`` and the lossy rules use the plan's Equal-Growth Trees; ``match`` also
    uses model-free drafts from the text.

    ``exactness`` matters where rows of a wide pass differ from a width-1 pass in their last bits. ``fast`` ignores the
    difference. ``strict`` decides by a width-1 pass if the top token leads by less than ``tolerance`` logits (None: the
    tolerance that ``yggdrasil parity`` measured). ``fixed-width`` runs every pass, plain ones too, ``fixed_width`` rows
    wide. ``audit`` keeps the decisions of ``fast`` and counts those that ``strict`` would change.

    Raises:
        YggdrasilError: a value is out of range, or options exclude each other.
    """

    rule: RuleName | OwnRule = "match"
    expansion: tuple[int, ...] | None = None
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    thinking_only: bool = False
    exactness: Exactness = "fast"
    tolerance: float | None = None  # logits
    fixed_width: int = 8
    audit: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rule, str) or not is_own_rule(self.rule):
            check_name("rule", self.rule, get_args(RuleName))
        check_name("exactness", self.exactness, get_args(Exactness))
        if self.expansion is not None:
            object.__setattr__(self, "expansion", tuple(_levels(self.expansion)))
        check_number("typical_epsilon", self.typical_epsilon, 0, 1, rule="above 0 and at most 1", is_open=True)
        check_number("typical_delta", self.typical_delta, 0, MAX_LEAD, rule="above 0", is_open=True)
        check_integer("relaxed_topk", self.relaxed_topk, 1)
        check_number("relaxed_delta", self.relaxed_delta, 0, MAX_LEAD, rule="at least 0")
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance, 0, MAX_LEAD, rule="at least 0, in logits")
        check_integer("fixed_width", self.fixed_width, 2)
        for name in ("thinking_only", "audit"):
            check_flag(name, getattr(self, name))
        keep_plain_numbers(self)
        faults = []
        if self.rule == "leviathan" and self.expansion and max(self.expansion) > 1:
            faults.append("the rule leviathan takes a chain; use specinfer or sequoia for several children a node")
        if self.rule not in ("match", "off") and (self.exactness == "strict" or self.audit):
            faults.append(
                f"exactness strict is for the rule match; {self.rule_name} has no width-1 decision to agree with"
            )
        if self.audit and self.exactness != "fast":
            faults.append("audit counts what exactness fast lets pass; leave exactness at fast")
        if faults:
            raise ArgumentValueError("; ".join(faults))

    @property
    def is_lossless(self) -> bool:
        """Whether the output follows the target's distribution: False for ``typical`` and ``relaxed``.

        For a user's own rule, it is the rule's attribute ``is_lossless``.
        """
        return self.rule not in LOSSY_RULES if isinstance(self.rule, str) else self.rule.is_lossless

    @property
    def rule_name(self) -> str:
        """Name of the acceptance rule in reports."""
        return self.rule if isinstance(self.rule, str) else self.rule.name


def thinking_marks(settings: Speculation, vocabulary: Mapping[str, int]) -> tuple[int, int] | None:
    """Return the ids of ``<think>`` and ``</think>`` for the rule ``relaxed`` with ``thinking_only``, else None.

    Raises:
        YggdrasilError: ``vocabulary`` (token -> id) lacks one of the two.
    """
    if settings.rule != "relaxed" or not settings.thinking_only:
        return None
    marks = ("<think>", "</think>")
    if any(mark not in vocabulary for mark in marks):
        raise YggdrasilError("thinking_only needs the tokens <think> and </think>, which this tokenizer lacks")
    return vocabulary[marks[0]], vocabulary[marks[1]]


def starts_thinking(prompt: Sequence[int], thinking: tuple[int, int] | None) -> bool:
    """Return whether ``prompt`` (token ids) ends between the two tokens of ``thinking``; False if that is None."""
    marks = [token for token in prompt if thinking is not None and token in thinking]
    return bool(marks) and thinking is not None and marks[-1] == thinking[0]


def own_rule(name: str) -> OwnRule:
    """Import a user's acceptance rule, named ``module:Class``, and return an instance.

    Raises:
        YggdrasilError: the class cannot be imported or instantiated, or lacks name, is_lossless or walk.
    """
    made = own_object("acceptance rule", name, own_class("acceptance rule", name))
    if not is_own_rule(made):
        raise YggdrasilError(
            f"the acceptance rule {name} lacks name, is_lossless or walk; docs/sampling.md has an example"
        )
    return cast("OwnRule", made)


def is_own_rule(given: Any) -> bool:
    """Return whether an object has what ``OwnRule`` requires: a str ``name``, a bool ``is_lossless``, a ``walk``."""
    has_name = isinstance(getattr(given, "name", None), str) and isinstance(getattr(given, "is_lossless", None), bool)
    return has_name and callable(getattr(given, "walk", None))


def _levels(expansion: Any) -> list[int]:
    levels = check_tokens("expansion", expansion)
    if not levels or min(levels) < 1:
        raise ArgumentValueError(f"expansion is {expansion!r}; it must be at least one level of at least one child")
    return levels


DEFAULT = Speculation()
OFF = Speculation(rule="off")
