"""Sampling and acceptance options of ``generate``, and what they make."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

from yggdrasil.acceptance.sampling import Constraint, SamplingParams
from yggdrasil.acceptance.speculation import Exactness, OwnRule, RuleName, Speculation, own_rule
from yggdrasil.cli import checks
from yggdrasil.cli.checks import parse_widths
from yggdrasil.errors import YggdrasilError
from yggdrasil.own_class import is_own_class

if TYPE_CHECKING:
    from yggdrasil.acceptance.sampler import TokenLogprobs

SAMPLING, CONSTRAINTS, ACCEPTANCE = "Sampling", "Constraints", "Acceptance: lossy rules, exactness"
PARAMS, SPECULATION = SamplingParams(), Speculation()  # the defaults have their home there

Temperature = Annotated[float, typer.Option(help="0: the best token always.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option(help="Draw from so many best tokens; 0: off.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Draw from the best tokens that hold this probability.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float,
    typer.Option(
        help="Draw from tokens with at least this share of the best one's probability.", rich_help_panel=SAMPLING
    ),
]
TypicalP = Annotated[
    float, typer.Option(help="Draw from the most typical tokens that hold this probability.", rich_help_panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Divide the scores of tokens seen, prompt included.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtract from the scores of tokens generated before.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="The same, for each time they were generated.", rich_help_panel=SAMPLING)
]
LogitBias = Annotated[
    list[str] | None, typer.Option(help="TOKEN=BIAS, by token number; can be repeated.", rich_help_panel=SAMPLING)
]
BadWord = Annotated[
    list[str] | None, typer.Option(help="A text that must not occur; can be repeated.", rich_help_panel=SAMPLING)
]
MinNewTokens = Annotated[int, typer.Option(help="No end-of-text before so many tokens.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same output, with or without speculation.", rich_help_panel=SAMPLING)
]
Logprobs = Annotated[int | None, typer.Option(help="With --json: log-probabilities, and so many alternatives.")]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        callback=checks.input_file,
        help="A file with a JSON schema the text must match.",
        rich_help_panel=CONSTRAINTS,
    ),
]
Regex = Annotated[
    str | None, typer.Option(help="A regular expression the text must match.", rich_help_panel=CONSTRAINTS)
]
GrammarFile = Annotated[
    Path | None,
    typer.Option(
        "--grammar",
        callback=checks.input_file,
        help="A Lark or GBNF grammar the text must match.",
        rich_help_panel=CONSTRAINTS,
    ),
]
SpeculationOption = Annotated[
    Literal["on", "off"], typer.Option(help="off: plain compiled decoding.", rich_help_panel=ACCEPTANCE)
]
RuleOption = Annotated[
    str,
    typer.Option(
        callback=checks.rule,
        metavar="|".join([*get_args(RuleName), "MODULE:CLASS"]),
        help="How drafted tokens are accepted; typical and relaxed are lossy. Or a class of your own.",
        rich_help_panel=ACCEPTANCE,
    ),
]
Expansion = Annotated[
    str | None,
    typer.Option(
        callback=checks.widths,
        help="Children of a node, level by level, such as 2,2,1: a k-ary tree.",
        rich_help_panel=ACCEPTANCE,
    ),
]
TypicalEpsilon = Annotated[
    float,
    typer.Option(
        callback=checks.finite, help="Rule typical: accept above this probability.", rich_help_panel=ACCEPTANCE
    ),
]
TypicalDelta = Annotated[
    float,
    typer.Option(
        callback=checks.finite,
        help="Rule typical: or above this share of exp(-entropy).",
        rich_help_panel=ACCEPTANCE,
    ),
]
RelaxedTopk = Annotated[
    int, typer.Option(help="Rule relaxed: accept among so many best tokens.", rich_help_panel=ACCEPTANCE)
]
RelaxedDelta = Annotated[
    float,
    typer.Option(
        callback=checks.finite,
        help="Rule relaxed: and so near the best in log-probability.",
        rich_help_panel=ACCEPTANCE,
    ),
]
ThinkingOnly = Annotated[
    bool, typer.Option("--thinking-only", help="Rule relaxed: only within <think>.", rich_help_panel=ACCEPTANCE)
]
ExactnessOption = Annotated[
    Exactness, typer.Option(help="What to do about near ties; see yggdrasil parity.", rich_help_panel=ACCEPTANCE)
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        callback=checks.finite,
        help="A lead below this is a near tie, in logits; parity's if unset.",
        rich_help_panel=ACCEPTANCE,
    ),
]
FixedWidth = Annotated[int, typer.Option(help="Exactness fixed-width: rows of every pass.", rich_help_panel=ACCEPTANCE)]
Audit = Annotated[
    bool,
    typer.Option(
        "--audit", help="Count the near ties that a width-1 pass decides otherwise.", rich_help_panel=ACCEPTANCE
    ),
]


def _options(
    temperature: Temperature = PARAMS.temperature,
    top_k: TopK = PARAMS.top_k,
    top_p: TopP = PARAMS.top_p,
    min_p: MinP = PARAMS.min_p,
    typical_p: TypicalP = PARAMS.typical_p,
    repetition_penalty: RepetitionPenalty = PARAMS.repetition_penalty,
    presence_penalty: PresencePenalty = PARAMS.presence_penalty,
    frequency_penalty: FrequencyPenalty = PARAMS.frequency_penalty,
    logit_bias: LogitBias = None,
    bad_word: BadWord = None,
    min_new_tokens: MinNewTokens = PARAMS.min_new_tokens,
    seed: Seed = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: GrammarFile = None,
    speculation: SpeculationOption = "on",
    rule: RuleOption = SPECULATION.rule_name,
    expansion: Expansion = None,
    typical_epsilon: TypicalEpsilon = SPECULATION.typical_epsilon,
    typical_delta: TypicalDelta = SPECULATION.typical_delta,
    relaxed_topk: RelaxedTopk = SPECULATION.relaxed_topk,
    relaxed_delta: RelaxedDelta = SPECULATION.relaxed_delta,
    thinking_only: ThinkingOnly = False,
    exactness: ExactnessOption = SPECULATION.exactness,
    tolerance: Tolerance = None,
    fixed_width: FixedWidth = SPECULATION.fixed_width,
    audit: Audit = False,
) -> None:
    """All options of this file, with their defaults; never called."""


OWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")  # what a model may recommend
Greedy = Annotated[
    bool,
    typer.Option("--greedy", help="The best token always, not the model's own sampling.", rich_help_panel=SAMPLING),
]


def takes_decoding_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` the sampling and acceptance options behind its own; they reach it as keywords."""
    return _with_options(command, list(signature(_options).parameters.values()))


def samples_as_the_model(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that samples as the model's files recommend unless options say otherwise."""
    usual = [
        each.replace(default=None) if each.name in OWN else each for each in signature(_options).parameters.values()
    ]
    greedy = Parameter("greedy", Parameter.KEYWORD_ONLY, default=False, annotation=Greedy)
    return _with_options(command, [greedy, *(each.replace(kind=Parameter.KEYWORD_ONLY) for each in usual)])


def _with_options(command: Callable[..., None], options: Sequence[Parameter]) -> Callable[..., None]:
    @wraps(command)
    def run(**values: Any) -> None:
        command(**values)

    own = [each for each in signature(command).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    parameters = [*own, *options]
    del run.__wrapped__  # whoever asks for the options is to find all of them
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return run


def named_sampling(options: dict[str, Any]) -> SamplingParams:
    """What ``samples_as_the_model``'s options say, the rest greedy: checked before a model is read.

    Raises:
        YggdrasilError: a value that cannot be, or --greedy beside one that means another.
    """
    given = [name for name in OWN if options[name] not in (None, getattr(PARAMS, name))]
    drawing = [name for name in given if name != "repetition_penalty"]
    if options["greedy"] and drawing:
        raise YggdrasilError(f"--greedy takes the best token always; leave out --{drawing[0].replace('_', '-')}")
    return sampling_of(options | {name: getattr(PARAMS, name) for name in OWN if options[name] is None})


def resolved_sampling(options: dict[str, Any], own: SamplingParams) -> SamplingParams:
    """``named_sampling`` with the model's ``own`` values where options say nothing, unless --greedy."""
    named = named_sampling(options)
    if options["greedy"] or options["temperature"] == 0:
        return named
    return replace(named, **{name: getattr(own, name) for name in OWN if options[name] is None})


def sampling_of(options: dict[str, Any]) -> SamplingParams:
    """Parameters from ``generate``'s options, by their names there."""
    same = (
        "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "min_new_tokens", "seed",
    )  # fmt: skip
    return SamplingParams(
        logit_bias=_biases(options["logit_bias"] or ()), bad_words=tuple(options["bad_word"] or ()),
        constraint=_constraint(options["json_schema"], options["regex"], options["grammar"]),
        logprobs=options.get("logprobs"), **{name: options[name] for name in same},
    )  # fmt: skip


def speculation_of(options: dict[str, Any]) -> Speculation:
    """Acceptance settings from ``generate``'s options; ``--speculation off`` is the rule ``off``."""
    same = (
        "typical_epsilon", "typical_delta", "relaxed_topk", "relaxed_delta", "thinking_only", "exactness",
        "tolerance", "fixed_width", "audit",
    )  # fmt: skip
    rule, expansion = options["rule"], options["expansion"]
    if options["speculation"] == "off" and rule not in ("match", "off"):
        raise YggdrasilError(f"--speculation off drafts nothing that --rule {rule} could accept; give one of the two")
    _check_company(options)
    return Speculation(
        rule="off" if options["speculation"] == "off" else _rule(rule),
        expansion=parse_widths(expansion) if expansion else None,
        **{name: options[name] for name in same},
    )


def _rule(name: str) -> RuleName | OwnRule:
    return own_rule(name) if is_own_class(name) else cast("RuleName", name)


def _check_company(options: dict[str, Any]) -> None:
    """Refuse an option that says nothing beside the others."""
    exactness, rule = options["exactness"], options["rule"]
    for option, is_given, belongs in (
        ("--thinking-only", options["thinking_only"] and rule != "relaxed", "--rule relaxed"),
        ("--fixed-width", options["fixed_width"] != SPECULATION.fixed_width and exactness != "fixed-width",
         "--exactness fixed-width"),
        ("--tolerance", options["tolerance"] is not None and exactness != "strict" and not options["audit"],
         "--exactness strict or --audit"),
    ):  # fmt: skip
        if is_given:
            raise YggdrasilError(f"{option} belongs to {belongs}, which is not given; leave it out, or give both")


def logprobs_record(logprobs: "Sequence[TokenLogprobs] | None") -> list[dict[str, Any]] | None:
    """Log-probabilities as the JSON output holds them."""
    if logprobs is None:
        return None
    return [{"token": entry.token, "logprob": entry.logprob, "top": entry.top} for entry in logprobs]


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
