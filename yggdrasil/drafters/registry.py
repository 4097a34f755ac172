"""Registry of model-free drafters by their names in commands and plans. A new drafter needs an entry in ``REGISTERED``.

Imports no torch before a drafter is created.
"""

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from yggdrasil.artifacts import parse_dataclass, parse_yaml
from yggdrasil.drafters.model_free_options import (
    ClassOptions,
    ModelFreeOptions,
    NGramOptions,
    StatisticsOptions,
)
from yggdrasil.drafters.shipped_assets import PREFIX, resolve_shipped_head
from yggdrasil.errors import YggdrasilError
from yggdrasil.own_class import is_own_class, own_class, own_object

if TYPE_CHECKING:
    from yggdrasil.drafters.protocol import Drafter

PLAIN, NGRAM, TEXT, TABLE = "none", "ngram", "text", "table"
USUAL = (TEXT, TABLE)


class DrafterEntry(NamedTuple):
    """A registered drafter: its factory and the class of its options."""

    maker: str  # ``module:name`` of the factory, called with the options
    options: type[ModelFreeOptions]


# One drafter with two sources of candidates.
_STATISTICS = DrafterEntry("yggdrasil.drafters.statistics.drafter:default_statistics", StatisticsOptions)
REGISTERED = {
    TEXT: _STATISTICS,
    TABLE: _STATISTICS,
    NGRAM: DrafterEntry("yggdrasil.drafters.ngram:NGramDrafter", NGramOptions),
}
_PROTOCOL = ("name", "capabilities", "begin", "extend", "propose", "cost")


def is_model_free_name(name: str) -> bool:
    """Return whether ``name`` is "none", a registered model-free drafter or a user's ``module:Class``.

    Any other name denotes a draft model or head: a folder, GGUF file, hub id or ``yggdrasil:NAME``.
    """
    return name == PLAIN or name in REGISTERED or is_own(name)


def is_own(name: str) -> bool:
    """Return whether ``name`` has the form ``module:Class`` of a user's drafter; False for ``yggdrasil:NAME``."""
    return not name.startswith(PREFIX) and is_own_class(name)


def missing_names(drafter: object) -> list[str]:
    """Return the attributes of the ``Drafter`` protocol that ``drafter``, an object or a class, lacks."""
    return [name for name in _PROTOCOL if not hasattr(drafter, name)]


def make_drafter(options: ModelFreeOptions) -> "Drafter":
    """Create the model-free drafter that ``options`` describe.

    N-gram statistics get the default scorer and no table. ``StatisticsDrafter.load`` reads those of a calibration.

    Raises:
        YggdrasilError: a user's class cannot be imported or is not a model-free drafter, or the native library, which
            n-gram statistics need, is missing.
    """
    if isinstance(options, ClassOptions):
        return own_drafter(options.drafter)
    maker = next(each.maker for each in REGISTERED.values() if each.options is type(options))
    return cast("Drafter", _found(maker)(options))


def own_drafter(name: str) -> "Drafter":
    """Create a user's drafter from its name ``module:Class``. The module may be in the working directory.

    Raises:
        YggdrasilError: the class cannot be imported or created, or is not a model-free drafter.
    """
    kind = own_class("drafter", name)
    # The class is checked before it is called, because a plan may name any class.
    lacking = missing_names(kind)
    if set(lacking) - {"name", "capabilities"}:  # __init__ may set these two
        raise YggdrasilError(f"the drafter {name} lacks {', '.join(lacking)}; docs/drafters.md has an example")
    made = own_object("drafter", name, kind)
    if lacking := missing_names(made):
        raise YggdrasilError(f"the drafter {name} lacks {', '.join(lacking)}; docs/drafters.md has an example")
    from yggdrasil.drafters.protocol import is_model_free

    if not is_model_free(made):
        raise YggdrasilError(
            f"the drafter {name} has a cost, which only calibrated models and heads can have by name; let its `cost` "
            "return (), or pass an object to Decoder.from_plan"
        )
    return cast("Drafter", made)


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


class NamedDrafters(NamedTuple):
    """The drafters of a configuration: an optional draft model or draft head, and model-free drafters."""

    drafter: str | None
    model_free: tuple[ModelFreeOptions, ...] = ()

    @property
    def has_table(self) -> bool:
        """Whether a static n-gram table is used, for which a calibration generates text of the target."""
        return any(isinstance(each, StatisticsOptions) and each.table for each in self.model_free)

    @property
    def is_plain(self) -> bool:
        """Whether there is no drafter at all, so that decoding is plain."""
        return self.drafter is None and not self.model_free


def named_drafters(names: Sequence[str], ngram: str = "") -> NamedDrafters:
    """Parse the drafters that a user names, all of which draft in one tree.

    Args:
        names: values of ``--drafter``: "none", "ngram", "text", "table", ``module:Class``, or one draft model or head.
            "text" is implied by a model and by "table". No names are the same as "none". Without the native library,
            "ngram" takes the place of "text" and "table".
        ngram: value of ``--ngram``, options as ``name=value,name=value``; an empty string selects the defaults.

    Raises:
        YggdrasilError: names cannot be combined, no such head is shipped, or ``ngram`` is given without the n-gram
            drafter.
    """
    if ngram and NGRAM not in names:
        raise YggdrasilError(f"--ngram is for --drafter ngram, the drafter is {' and '.join(names)}")
    if PLAIN in names:
        if set(names) != {PLAIN}:
            raise YggdrasilError(f"--drafter {' and '.join(names)} do not draft together; none stands alone")
        return NamedDrafters(None)
    models = sorted({resolve_shipped_head(name) for name in names if not is_model_free_name(name)})
    if len(models) > 1:
        raise YggdrasilError(f"--drafter {' and '.join(models)} do not draft together; give one model")
    model_free: list[ModelFreeOptions] = [ngram_options(ngram)] if NGRAM in names else []
    own = sorted({name for name in names if is_own(name)})
    if len(own) > 1:
        raise YggdrasilError(f"--drafter {' and '.join(own)} do not draft together; give one of your own")
    model_free += [ClassOptions(name) for name in own]
    if not set(names) <= {NGRAM, *own}:
        model_free += _statistics(with_table=TABLE in names, beside=model_free)
    return NamedDrafters(models[0] if models else None, tuple(model_free))


def _statistics(*, with_table: bool, beside: Sequence[ModelFreeOptions]) -> list[ModelFreeOptions]:
    """Return the options of the n-gram statistics, as a list of one.

    Without the native library, which counts n-grams, return the default options of the n-gram look-up instead, or an
    empty list if ``beside`` has options of the look-up.
    """
    from yggdrasil.native import is_native

    if is_native():
        return [StatisticsOptions(table=with_table)]
    return [] if any(isinstance(each, NGramOptions) for each in beside) else [NGramOptions()]


def names_of(model_free: Sequence[ModelFreeOptions]) -> set[str]:
    """Return the names by which a user selects these model-free drafters: {"none"} without any.

    N-gram statistics with a table have two names, "text" and "table".
    """
    names = {PLAIN} if not model_free else set()
    for each in model_free:
        if isinstance(each, StatisticsOptions):
            names |= {TEXT, TABLE} if each.table else {TEXT}
        else:
            names.add(each.drafter if isinstance(each, ClassOptions) else NGRAM)
    return names


def ngram_options(text: str) -> NGramOptions:
    """Parse options of the n-gram drafter from ``name=value,name=value``. Missing options have their defaults.

    Raises:
        YggdrasilError: a part is not an option with a valid value.
    """
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
