"""Drafters as they are named on the command line."""

import dataclasses
from collections.abc import Sequence

import yaml

from yggdrasil.artifacts import parse_dataclass
from yggdrasil.drafters.options import CountsOptions, FreeDrafter, NGramOptions
from yggdrasil.errors import YggdrasilError

COUNTED = {"text", "table"}


def named_drafter(names: Sequence[str], ngram: str = "") -> str | FreeDrafter:
    """The drafter that ``--drafter``, given once or more, stands for: a model's source, or options of one without.

    Raises:
        YggdrasilError: names that do not go together, or ``ngram`` options for something else.
    """
    if ngram and list(names) != ["ngram"]:
        raise YggdrasilError(f"--ngram is for --drafter ngram, the drafter is {' and '.join(names)}")
    if list(names) == ["table"]:
        raise YggdrasilError("--drafter table needs text beside it: give --drafter text --drafter table")
    if set(names) <= COUNTED:
        return CountsOptions(table="table" in names)
    if len(set(names)) > 1:
        raise YggdrasilError(
            f"--drafter {' and '.join(names)} do not draft together yet; give one of them, or text and table"
        )
    return ngram_options(ngram) if names[0] == "ngram" else names[0]


def ngram_options(text: str) -> NGramOptions:
    """Read ``name=value,name=value``; what is not named keeps its default. YggdrasilError names what is wrong."""
    given: dict[str, object] = dataclasses.asdict(NGramOptions())
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise YggdrasilError(f"--ngram {part!r} is not name=value; there are {', '.join(given)}")
        try:
            given[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise YggdrasilError(f"--ngram {part!r} has no readable value") from None
    return parse_dataclass(NGramOptions, given, "--ngram")
