"""Classes of a user's own, named ``module:Class`` in commands and plans."""

import re
import sys
from importlib import import_module
from typing import Any

from yggdrasil.errors import YggdrasilError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_own_class(name: str) -> bool:
    """Whether ``name`` has the form ``module:Class``."""
    return _NAME.fullmatch(name) is not None


def own_class(what: str, name: str) -> Any:
    """The class that ``name`` names; its module may lie in the working directory. ``what`` names its use in errors.

    Raises:
        YggdrasilError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise YggdrasilError(f"the {what} {name} cannot be imported ({error}); run where its module lies") from error
    finally:
        sys.path.remove("")
