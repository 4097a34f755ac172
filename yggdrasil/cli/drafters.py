"""Drafters as they are named on the command line."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import yaml

from yggdrasil.artifacts import parse_dataclass
from yggdrasil.drafters.options import CountsOptions, FreeOptions, NGramOptions
from yggdrasil.errors import YggdrasilError

COUNTED = {"text", "table"}


class Named(NamedTuple):
    """The drafter that grows the tree (a model's source, or options of one without), and what guesses beside it."""

    drafter: str | FreeOptions
    beside: CountsOptions | None = None

    @property
    def has_table(self) -> bool:
        """Whether the target is to write text for a table."""
        counts = self.drafter if isinstance(self.drafter, CountsOptions) else self.beside
        return counts is not None and counts.table


def named_drafters(names: Sequence[str], ngram: str = "") -> Named:
    """The drafters that ``--drafter``, given once or more, stands for. The text is always counted beside a model.

    Raises:
        YggdrasilError: names that do not go together, or ``ngram`` options for something else.
    """
    if ngram and list(names) != ["ngram"]:
        raise YggdrasilError(f"--ngram is for --drafter ngram, the drafter is {' and '.join(names)}")
    if list(names) == ["table"]:
        raise YggdrasilError("--drafter table needs text beside it: give --drafter text --drafter table")
    if set(names) <= COUNTED:
        return Named(CountsOptions(table="table" in names))
    others = sorted(set(names) - COUNTED)
    if len(others) > 1 or ("ngram" in others and len(set(names)) > 1):
        raise YggdrasilError(
            f"--drafter {' and '.join(names)} do not draft together; give one model, and text and table beside it"
        )
    if others == ["ngram"]:
        return Named(ngram_options(ngram))
    return Named(others[0], CountsOptions(table="table" in names))


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
