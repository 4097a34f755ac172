"""Drafters as they are named on the command line."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from yggdrasil.artifacts import parse_dataclass, parse_yaml
from yggdrasil.drafters.options import CountsOptions, FreeOptions, LookaheadOptions, NGramOptions
from yggdrasil.drafters.shipped import whole_name
from yggdrasil.errors import YggdrasilError

PLAIN, NGRAM, TEXT, TABLE, RECYCLING, LOOKAHEAD = "none", "ngram", "text", "table", "recycling", "lookahead"
FREE = (PLAIN, NGRAM, TEXT, TABLE, RECYCLING, LOOKAHEAD)  # whatever needs no model
USUAL = (TEXT, TABLE)


class Named(NamedTuple):
    """The model that drafts, and what guesses without a pass, beside it or alone."""

    drafter: str | None
    free: tuple[FreeOptions, ...] = ()

    @property
    def has_table(self) -> bool:
        """Whether the target is to write text for a table."""
        return any(isinstance(each, CountsOptions) and each.table for each in self.free)

    @property
    def is_plain(self) -> bool:
        """Whether nothing guesses."""
        return self.drafter is None and not self.free


def named_drafters(names: Sequence[str], ngram: str = "") -> Named:
    """The drafters that ``--drafter``, given once or more, stands for: they guess in one tree.

    The text is always counted beside a model, a table and recycling.

    Raises:
        YggdrasilError: names that do not go together, or that no shipped head has, or ``ngram`` options where none are
            meant.
    """
    if ngram and NGRAM not in names:
        raise YggdrasilError(f"--ngram is for --drafter ngram, the drafter is {' and '.join(names)}")
    if PLAIN in names:
        if set(names) != {PLAIN}:
            raise YggdrasilError(f"--drafter {' and '.join(names)} do not draft together; none stands alone")
        return Named(None)
    models = sorted({whole_name(name) for name in names} - set(FREE))
    if len(models) > 1:
        raise YggdrasilError(f"--drafter {' and '.join(models)} do not draft together; give one model")
    free: list[FreeOptions] = [ngram_options(ngram)] if NGRAM in names else []
    if LOOKAHEAD in names:
        free.append(LookaheadOptions())
    if not set(names) <= {NGRAM, LOOKAHEAD}:
        free.append(CountsOptions(table=TABLE in names, recycling=RECYCLING in names))
    return Named(models[0] if models else None, tuple(free))


def names_of(free: Sequence[FreeOptions]) -> set[str]:
    """The names that stand for what guesses without a pass."""
    names = {PLAIN} if not free else set()
    for each in free:
        if isinstance(each, CountsOptions):
            names |= {TEXT, *([TABLE] if each.table else []), *([RECYCLING] if each.recycling else [])}
        else:
            names.add(NGRAM if isinstance(each, NGramOptions) else LOOKAHEAD)
    return names


def ngram_options(text: str) -> NGramOptions:
    """Read ``name=value,name=value``; what is not named keeps its default. YggdrasilError names what is wrong."""
    given: dict[str, object] = dataclasses.asdict(NGramOptions())
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise YggdrasilError(f"--ngram {part!r} is not name=value; there are {', '.join(given)}")
        try:
            given[name.strip()] = parse_yaml(value)
        except ValueError:
            raise YggdrasilError(f"--ngram {part!r} has no readable value") from None
    return parse_dataclass(NGramOptions, given, "--ngram")
