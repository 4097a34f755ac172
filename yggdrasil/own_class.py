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
        YggdrasilError: the class cannot be imported, or the name is of no class.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # the module may raise anything, such as a SyntaxError
        reason = f"{type(error).__name__}: {error}"
        raise YggdrasilError(f"the {what} {name} cannot be imported ({reason}); run in its folder") from error
    finally:
        sys.path.remove("")
    if not isinstance(found, type):
        raise YggdrasilError(f"the {what} {name} is no class")
    return found


def own_object(what: str, name: str, kind: Any) -> Any:
    """Return an instance of a user's class, created without arguments.

    Args:
        what: purpose of the class in error messages, such as "drafter".
        name: ``module:Class``, the name by which ``own_class`` has imported the class, for error messages.
        kind: the class.

    Raises:
        YggdrasilError: the constructor fails, for example because it needs arguments.
    """
    try:
        return kind()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise YggdrasilError(f"the {what} {name} cannot be created without arguments ({reason})") from error
