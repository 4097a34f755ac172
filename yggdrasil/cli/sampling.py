"""The sampling and acceptance options of ``generate`` and ``chat``, and their conversion to parameters."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer

from yggdrasil.acceptance.sampling import Constraint, SamplingParams
from yggdrasil.acceptance.speculation import Exactness, OwnRule, RuleName, Speculation, own_rule
from yggdrasil.arguments import check_package
from yggdrasil.cli import checks
from yggdrasil.cli.checks import parse_widths
from yggdrasil.cli.shared_options import option, with_options
from yggdrasil.errors import YggdrasilError
from yggdrasil.own_class import is_own_class

SAMPLING, CONSTRAINTS, ACCEPTANCE = "Sampling", "Constraints", "Acceptance: lossy rules, exactness"
PARAMS, SPECULATION = SamplingParams(), Speculation()  # define the defaults


def _options() -> list[Parameter]:
    """Return the sampling and acceptance options with their defaults."""
    numbers: tuple[tuple[str, Any, str], ...] = (
        ("temperature", float, "0: greedy decoding."),
        ("top_k", int, "Sample from the k best tokens; 0: off."),
        ("top_p", float, "Sample from the best tokens with this total probability."),
        ("min_p", float, "Sample from tokens with at least this share of the best token's probability."),
        ("typical_p", float, "Sample from the most typical tokens with this total probability."),
        ("repetition_penalty", float, "Divide the logits of tokens in prompt and output."),
        ("presence_penalty", float, "Subtract from the logits of generated tokens."),
        ("frequency_penalty", float, "Subtract so much per occurrence in the output."),
        ("min_new_tokens", int, "No end-of-text before so many tokens."),
        ("seed", int | None, "Same seed, same output, with or without speculation."),
    )
    lists: tuple[tuple[str, str], ...] = (
        ("logit_bias", "TOKEN=BIAS, by token id; can be repeated."),
        ("bad_word", "A text that must not be generated; can be repeated."),
    )
    constraints: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
        ("json_schema", Path | None, "A file with a JSON schema the text must match.", {"callback": checks.input_file}),
        ("regex", str | None, "A regular expression the text must match.", {}),
        ("grammar", Path | None, "A Lark or GBNF grammar the text must match.", {"callback": checks.input_file}),
    )
    rules = {"callback": checks.rule, "metavar": "|".join([*get_args(RuleName), "MODULE:CLASS"])}
    finite = {"callback": checks.finite}
    acceptance: tuple[tuple[str, Any, Any, str, dict[str, Any]], ...] = (
        ("speculation", Literal["on", "off"], "on", "off: plain decoding.", {}),
        ("rule", str, SPECULATION.rule_name,
         "How drafted tokens are accepted; typical and relaxed are lossy. Or a class of your own.", rules),
        ("expansion", str | None, None, "Children of a node per level, such as 2,2,1: a k-ary tree.",
         {"callback": checks.widths}),
        ("typical_epsilon", float, SPECULATION.typical_epsilon, "Rule typical: accept above this probability.", finite),
        ("typical_delta", float, SPECULATION.typical_delta, "Rule typical: or above this share of exp(-entropy).",
         finite),
        ("relaxed_topk", int, SPECULATION.relaxed_topk, "Rule relaxed: accept the k best tokens.", {}),
        ("relaxed_delta", float, SPECULATION.relaxed_delta, "Rule relaxed: within this log-probability of the best.",
         finite),
        ("thinking_only", bool, False, "Rule relaxed: only within <think>.", {}),
        ("exactness", Exactness, SPECULATION.exactness, "How near ties are decided; see yggdrasil parity.", {}),
        ("tolerance", float | None, None, "Leads below this are near ties, in logits. Default: parity's.", finite),
        ("fixed_width", int, SPECULATION.fixed_width, "Exactness fixed-width: rows of every pass.", {}),
        ("audit", bool, False, "Count the near ties that a one-row pass decides differently.", {}),
    )  # fmt: skip
    return [
        *(option(name, kind, getattr(PARAMS, name), text, rich_help_panel=SAMPLING) for name, kind, text in numbers),
        *(option(name, list[str] | None, None, text, rich_help_panel=SAMPLING) for name, text in lists),
        *(
            option(name, kind, None, text, rich_help_panel=CONSTRAINTS, **more)
            for name, kind, text, more in constraints
        ),
        *(option(*first, rich_help_panel=ACCEPTANCE, **more) for *first, more in acceptance),
    ]


OWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")  # which a model's files recommend
Logprobs = Annotated[int | None, typer.Option(help="With --json: log-probabilities, and so many alternatives.")]


def takes_decoding_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the sampling and acceptance options added, whose values it gets as keyword arguments.

    ``sampling_of`` and ``speculation_of`` convert these values.
    """
    return with_options(command, _options())


def takes_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the sampling options added, without constraints; ``sampling_of`` converts the values."""
    return with_options(command, [each for each in _options() if _panel(each) == SAMPLING])


def _panel(parameter: Parameter) -> str | None:
    """Return the heading under which --help lists an option."""
    (described,) = parameter.annotation.__metadata__
    return cast("str | None", described.rich_help_panel)


def takes_recommended_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the option ``greedy`` and the sampling and acceptance options added.

    This is for commands that by default sample as the model's files recommend. An option in ``OWN`` is None if the user
    does not give it; ``resolved_sampling`` replaces None by the recommended value.
    """
    usual = [each.replace(default=None) if each.name in OWN else each for each in _options()]
    greedy = option(
        "greedy", bool, False, "Decode greedily instead of the model's recommended sampling.", rich_help_panel=SAMPLING
    )
    return with_options(command, [greedy, *usual])


def given_sampling(options: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters that the user has given; the others have their defaults (greedy decoding).

    Args:
        options: values of the options that ``takes_recommended_sampling_options`` adds.

    Raises:
        YggdrasilError: a value is invalid, or --greedy is combined with an option that samples.
    """
    given = [name for name in OWN if options[name] not in (None, getattr(PARAMS, name))]
    drawing = [name for name in given if name != "repetition_penalty"]
    if options["greedy"] and drawing:
        raise YggdrasilError(f"--greedy takes the best token always; leave out --{drawing[0].replace('_', '-')}")
    return sampling_of(options | {name: getattr(PARAMS, name) for name in OWN if options[name] is None})


def resolved_sampling(options: dict[str, Any], own: SamplingParams) -> SamplingParams:
    """Return the sampling parameters that the user has given; the others have the model's recommended values.

    Args:
        options: values by option name, as ``takes_recommended_sampling_options`` adds them; None: not given.
        own: parameters that the model's files recommend. They are not used with ``greedy`` or temperature 0.

    Raises:
        YggdrasilError: as ``given_sampling``.
    """
    named = given_sampling(options)
    if options["greedy"] or options["temperature"] == 0:
        return named
    return replace(named, **{name: getattr(own, name) for name in OWN if options[name] is None})


def sampling_of(options: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters made of option values.

    Args:
        options: values by option name, as ``takes_decoding_options`` or ``takes_sampling_options`` adds them. Options
            in ``OWN`` must not be None. Options that ``takes_recommended_sampling_options`` adds are for
            ``resolved_sampling`` and ``given_sampling``.

    Raises:
        YggdrasilError: a value is invalid, or the file of a JSON schema or grammar cannot be read.
    """
    same = (
        "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "min_new_tokens", "seed",
    )  # fmt: skip
    return SamplingParams(
        logit_bias=_biases(options["logit_bias"] or ()), bad_words=tuple(options["bad_word"] or ()),
        constraint=_constraint(*(options.get(name) for name in ("json_schema", "regex", "grammar"))),
        logprobs=options.get("logprobs"), **{name: options[name] for name in same},
    )  # fmt: skip


def changed(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters, by name, that differ from those of greedy decoding."""
    return {name: value for name, value in asdict(sampling).items() if value != getattr(PARAMS, name)}


def speculation_of(options: dict[str, Any]) -> Speculation:
    """Return the speculation settings made of option values.

    Args:
        options: values by option name, as ``takes_decoding_options`` adds them.

    Raises:
        YggdrasilError: a value is invalid, or an option has no effect with the others.
    """
    same = (
        "typical_epsilon", "typical_delta", "relaxed_topk", "relaxed_delta", "thinking_only", "exactness",
        "tolerance", "fixed_width", "audit",
    )  # fmt: skip
    rule, expansion = options["rule"], options["expansion"]
    if options["speculation"] == "off" and rule not in ("match", "off"):
        raise YggdrasilError(f"--speculation off drafts nothing that --rule {rule} could accept; give one of the two")
    _check_options_agree(options)
    return Speculation(
        rule="off" if options["speculation"] == "off" else _rule(rule),
        expansion=parse_widths(expansion) if expansion else None,
        **{name: options[name] for name in same},
    )


def _rule(name: str) -> RuleName | OwnRule:
    return own_rule(name) if is_own_class(name) else cast("RuleName", name)


_OF_RULE = {"typical": ("typical_epsilon", "typical_delta"), "relaxed": ("relaxed_topk", "relaxed_delta")}


def _check_options_agree(options: dict[str, Any]) -> None:
    """Raise YggdrasilError if an option has no effect with the others."""
    exactness, rule = options["exactness"], options["rule"]
    for name, is_given, belongs in (
        ("--thinking-only", options["thinking_only"] and rule != "relaxed", "--rule relaxed"),
        *((f"--{name.replace('_', '-')}", options[name] != getattr(SPECULATION, name) and rule != own, f"--rule {own}")
          for own in ("typical", "relaxed") for name in _OF_RULE[own]),
        ("--fixed-width", options["fixed_width"] != SPECULATION.fixed_width and exactness != "fixed-width",
         "--exactness fixed-width"),
        ("--tolerance", options["tolerance"] is not None and exactness != "strict" and not options["audit"],
         "--exactness strict or --audit"),
    ):  # fmt: skip
        if is_given:
            raise YggdrasilError(f"{name} belongs to {belongs}, which is not given; leave it out, or give both")


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise YggdrasilError(f"--logit-bias {pair} is not TOKEN=BIAS, such as 42=-3.5") from None
    return biases


def _constraint(schema: Path | None, regex: str | None, grammar: Path | None) -> Constraint | None:
    if sum(given is not None for given in (schema, regex, grammar)) > 1:
        raise YggdrasilError("give one of --json-schema, --regex and --grammar")
    if schema is not None or regex is not None or grammar is not None:
        check_package("llguidance", "a constraint", "structured")
    if regex is not None:
        return Constraint("regex", regex)
    if schema is not None:
        text = _read(schema)
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise YggdrasilError(f"{schema} is not JSON that can be read: {error}") from None
        return Constraint("json_schema", text)
    return Constraint("grammar", _read(grammar)) if grammar is not None else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise YggdrasilError(f"{path} could not be read: {error}; give a file of text") from None
