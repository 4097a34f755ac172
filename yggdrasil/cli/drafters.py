"""Drafters as they are named on the command line."""

import dataclasses

import yaml

from yggdrasil.artifacts import parse_dataclass
from yggdrasil.drafters.options import NGramOptions
from yggdrasil.errors import YggdrasilError


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
