"""Every option of every command, with values that no one can mean. Walked, so that no option is forgotten."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

LONG = "x" * 300  # longer than a file's name may be
WHOLE = ("-1", "-99999999999999999999", "nan", "1.5", "x", "")
NUMBERS = ("nan", "inf", "-inf", "1e999", "x", "")
THREADS = ("1025", "99999999999")
LISTS = ("", "x", "1,,2", "nan", "0", "-1", "1;2", "1.5.5")
INPUTS = ("no/such/file", ".", "prompts.jsonl/below", LONG, "")
OUTPUTS = ("prompts.jsonl/below", "/proc/no/such", f"{LONG}/{LONG}", "")
# Options whose value is a list in a text, or a path that is written.
LIST_NAMES = {
    "draft_widths", "verify_widths", "contexts", "max_length", "budget", "expansion", "temperatures",
}  # fmt: skip
OUTPUT_FILES, OUTPUT_FOLDERS = {"dump_mismatches"}, {"root", "csv", "train"}
# Texts that mean something only if they fit, by the option's name.
_NAMES = ("no-such", "../up", "", "a\nb", LONG)
_MODELS = ("no/such", "prompts.jsonl", "", LONG, "plans")
_ADDRESSES = ("", "x", "ftp://x", "http://", "http://[", "http://127.0.0.1:1", "http://127.0.0.1:99999")
TEXTS = {
    "target": _MODELS, "drafter": _MODELS, "plan": _NAMES, "profile": _NAMES, "name": _NAMES[1:], "save_as": _NAMES[1:],
    "weights": ("nonsense", "", "q4_k_m", "Q4_0"), "tree": ("nonsense", ""), "figure": ("nonsense", ""),
    "ngram": ("x", "x=1", "max_draft_len=0", "max_draft_len=[", "is_keep_all=7", "max_draft_len=" + "9" * 5000),
    "logit_bias": ("5", "5=nan", "=1", "5=1e999", "99999=1", "-1=1", "x" * 300, "", "9" * 5000 + "=1"),
    "regex": ("(", "", "[", "*", "(?<=a)b"), "bad_word": ("",), "stop": ("",), "prompt": ("",),
    "host": ("no such host", "999.1.1.1", "-", LONG, "a\nb"), "api_key": ("", "a b", "a\nb", " "),
    "cors_origin": ("", "nonsense", "http://a/b", "a\nb"), "url": _ADDRESSES,
}  # fmt: skip
# Negative numbers that mean something: seeds of a generator.
ANY_SIGN = {"seed"}


class Absurd(NamedTuple):
    """One option with one value, and the command line around it."""

    option: str  # as it is typed, such as --limit
    value: str
    arguments: list[str]

    @property
    def names(self) -> list[str]:
        """What a sentence about it must hold one of: the option as typed, or as Python spells it."""
        named = [self.option, self.option.strip("-").replace("-", "_")]
        return [*named, self.value] if len(self.value) > 3 else named


def absurd_options(app: typer.Typer, plan: str, *, has_models: bool = True) -> Iterator[Absurd]:
    """Every absurd value of every option; texts that mean nothing only where the models of ``plan`` are there.

    Where they are gone, whoever loads them first is seen.
    """
    for path, command in _commands(typer.main.get_command(app), ()):
        kinds = get_type_hints(inspect.unwrap(command.callback))
        for parameter in command.params:
            if parameter.param_type_name != "option" or parameter.name not in kinds:
                continue
            annotation = kinds[parameter.name]
            if not has_models and _is_text(parameter, annotation):
                continue
            for value in _values(path, parameter, annotation):
                arguments = [*path, *_around(command, parameter, plan), f"{parameter.opts[0]}={value}"]
                yield Absurd(parameter.opts[0], value, arguments)


def prompt_commands(app: typer.Typer, plan: str, target: str) -> Iterator[list[str]]:
    """Every command that takes --prompts, up to the file."""
    for path, command in _commands(typer.main.get_command(app), ()):
        for parameter in command.params:
            if parameter.name == "prompts":
                around = [target if word == "missing" else word for word in _around(command, parameter, plan)]
                yield [*path, *around, "--prompts"]


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield path, command
    for name, child in inner.items():
        yield from _commands(child, (*path, name))


def _around(command: Any, left_out: Any, plan: str) -> list[str]:
    """Arguments that let the command get as far as its models."""
    given = {
        "model": {"calibrate": "missing", "train": "missing", "search": "faults"}.get(command.name, plan),
        "plan": plan, "source": plan, "name": plan, "profile": "faults", "prompts": "prompts.jsonl",
        "target": "missing", "drafter": "ngram", "out": "out", "contexts": "64", "to": "llama-server",
    }  # fmt: skip
    found: list[str] = []
    if command.name == "calibrate":
        given["name"] = "new"
    if command.name == "report" and left_out.name == "name":
        found += ["--out", "out"]
    if left_out.name == "drafter":
        given["model"] = "target"  # which is looked at first
    for parameter in command.params:
        is_wanted = parameter.required or parameter.name in ("prompts", "model", "contexts")
        is_named = (
            parameter.name == "model" and left_out.name in ("plan", "target", "profile", "name") and left_out.hidden
        )
        if is_named or parameter is left_out or not is_wanted or parameter.name not in given:
            continue
        value = given[parameter.name]
        found += [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    return found


def _is_text(parameter: Any, annotation: Any) -> bool:
    return bool({annotation, *get_args(annotation)} & {str, list[str]}) and parameter.name not in LIST_NAMES


def _values(path: tuple[str, ...], parameter: Any, annotation: Any) -> tuple[str, ...]:
    kinds = {annotation, *get_args(annotation)}
    if _is_text(parameter, annotation):
        is_later = path == ("chat",) and parameter.name in ("regex", "logit_bias")  # when its model is there
        return () if is_later else TEXTS.get(parameter.name, ())
    if int in kinds:
        more = THREADS if parameter.name.endswith("threads") else ()
        return (*(WHOLE[2:] if parameter.name in ANY_SIGN else WHOLE), *more)
    if float in kinds:
        return NUMBERS
    if any(get_origin(kind) is Literal for kind in kinds):
        return ("nonsense", "", "-1")
    if parameter.name in LIST_NAMES:
        return tuple(value for value in LISTS if parameter.name != "temperatures" or value != "0")
    if parameter.name in OUTPUT_FOLDERS or (
        parameter.name == "out" and path[-1] in ("profile", "parity", "figures", "train")
    ):
        return ("prompts.jsonl", *OUTPUTS[:-1])  # an empty path is the working folder
    if parameter.name in OUTPUT_FILES or parameter.name == "out":
        return (".", *OUTPUTS)
    return INPUTS if Path in kinds or list[Path] in kinds else ()
