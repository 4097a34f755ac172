"""User-defined classes (drafters, acceptance rules), named ``module:Class`` in commands and plans."""

import re
import sys
from importlib import import_module
from typing import Any

from yggdrasil.errors import YggdrasilError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_own_class(name: str) -> bool:
    """Return whether ``name`` has the form ``module:Class``."""
    return _NAME.fullmatch(name) is not None


def own_class(what: str, name: str) -> Any:
    """Import a user's class, named ``module:Class``, and return the class. The working directory is searched first.

    Args:
        what: purpose of the class in error messages, such as "drafter".
        name: ``module:Class``; ``is_own_class`` tells whether a name has this form.

    Raises:
        YggdrasilError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise YggdrasilError(f"the {what} {name} cannot be imported ({error}); run in its folder") from error
    finally:
        sys.path.remove("")
