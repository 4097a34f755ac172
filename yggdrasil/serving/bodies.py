"""What is wrong with a request's body, in one sentence; what was sent is not repeated."""

import re
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from yggdrasil.errors import one_line
from yggdrasil.serving.faults import Fault

# What validation adds to a value's place where it may be of several kinds.
_KIND = re.compile(r"function-|constrained-|(list|dict|literal)\[|(str|int|float|bool)$|[A-Z]")

Sent = TypeVar("Sent", bound=BaseModel)
_OWN = {"two_names", "no_json"}  # kinds of faults of a whole body that say what is wrong themselves


def invalid_fault(error: RequestValidationError, content_type: str) -> Fault:
    """The first thing that does not fit.

    Where a value may be of several kinds, each says what is wrong with it: the one that fits furthest is meant.
    """
    found = error.errors()
    first = max((each for each in found if each["loc"][:2] == found[0]["loc"][:2]), key=_fit)
    if first["type"] == "json_invalid":
        return Fault(400, f"the body is not JSON: {first['ctx']['error']} (at character {first['loc'][-1]})")
    if first["loc"] == ("body",) and first["type"] not in _OWN:
        if first["type"] == "missing":
            return Fault(400, "the body is empty; send a JSON object")
        if "json" not in content_type:
            return Fault(400, "the body is not sent as JSON; send it with the header Content-Type: application/json")
        return Fault(400, "the body is JSON, and no object")
    place = ".".join(part for part in map(str, first["loc"][1:]) if not _KIND.match(part))
    said = str(first["msg"])
    return Fault(400, f"{place}: {said}" if place else said, param=place or None)


def _fit(each: dict[str, Any]) -> tuple[int, bool, tuple[int, ...]]:
    """Deeper is further, another value of the right type is further than another type, and later in a list too."""
    places = tuple(part for part in each["loc"] if isinstance(part, int))
    return len(each["loc"]), not str(each["type"]).endswith("_type"), places


def as_if_sent(kind: type[Sent], fields: dict[str, Any]) -> Sent:
    """Another request in the words of this ``kind``; RequestValidationError, as if it had been sent so."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error


def unread_fault(error: HTTPException) -> Fault:
    """A body that could not be read at all: FastAPI says no more than that, and keeps the reason beside it."""
    reason = error.__cause__
    if isinstance(reason, UnicodeDecodeError):
        return Fault(400, f"the body is not text in UTF-8 (byte {reason.start})")
    if isinstance(reason, RecursionError):
        return Fault(400, "the body is nested too deeply")
    if isinstance(reason, ValueError):
        return Fault(400, f"the body cannot be read: {one_line(reason)}")
    return Fault(error.status_code, str(error.detail), code="body_too_large" if error.status_code == 413 else None)
