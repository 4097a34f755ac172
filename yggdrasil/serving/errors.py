"""HTTP errors, in the form of OpenAI's error object or of Ollama's API."""

import re
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from yggdrasil.errors import YggdrasilError, one_line

# Parts that pydantic adds to the location of a value whose type is a union.
_KIND = re.compile(r"function-|constrained-|(list|dict|literal)\[|(str|int|float|bool)$|[A-Z]")

Sent = TypeVar("Sent", bound=BaseModel)
_OWN = {"two_names", "no_json"}  # error types of our own validators of the whole body, with complete messages


_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 503: "unavailable_error",
}  # fmt: skip


class ErrorBody(BaseModel):
    """OpenAI's error object: the value of ``error`` in an error reply."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorReply(BaseModel):
    """The body of an error reply (status 4xx or 5xx), except in Ollama's API."""

    error: ErrorBody


OLLAMA = "/api/"  # prefix of the paths of Ollama's API


class Fault(Exception):
    """An error reply: HTTP status, message and headers.

    ``kind`` is the error type, by default OpenAI's type for the status. ``more`` holds further fields of the error
    object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        more: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.more, self.headers = more or {}, headers or {}

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body of the error reply to a request for ``path``: ``{"error": ...}``.

        The value of ``error`` is OpenAI's error object; for a path of Ollama's API it is the message.
        """
        if path.startswith(OLLAMA):
            return {"error": self.message}
        error = ErrorBody(message=self.message, type=self.kind, param=self.param, code=self.code)
        return {"error": {**error.model_dump(), **self.more}}


class ClientGone(Exception):
    """Raised if the client disconnects before the answer is complete."""


def context_fault(prompt_tokens: int, limit: int, *, is_whole: bool = True) -> Fault:
    """Return, not raise, the error reply (400) for a prompt that is too long for a context of ``limit`` tokens.

    Args:
        prompt_tokens: length of the prompt; if not ``is_whole``, a lower bound of the length.
    """
    count = f"{'' if is_whole else 'more than '}{prompt_tokens}"
    return Fault(
        400,
        f"the prompt has {count} tokens, the context holds {limit} and an answer needs one at least; shorten it",
        kind="exceed_context_size_error", code="context_length_exceeded",
        more={"n_prompt_tokens": prompt_tokens, "n_ctx": limit},
    )  # fmt: skip


def fault_of(error: BaseException) -> Fault:
    """Return the error reply for an exception.

    A ``Fault`` is returned itself. A YggdrasilError gives a reply with its message and status 400, or 500 if the
    message is about non-finite logits, a full memory or a bug. Other exceptions give a general message and
    status 500.
    """
    if isinstance(error, Fault):
        return error
    if isinstance(error, YggdrasilError):
        is_ours = any(sign in str(error) for sign in ("not finite", "memory is full", "fault of ours"))
        return Fault(500 if is_ours else 400, str(error))
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return Fault(500, "the server ran out of memory on this request; shorten it")
    return Fault(500, f"the server failed on this request ({type(error).__name__}); its log has the details")


def invalid_fault(error: RequestValidationError, content_type: str) -> Fault:
    """Return the error reply (400) for a request with invalid fields; the message names the first invalid field.

    For a field with a union type pydantic reports one error per member: the reply is about the member that matched
    furthest. A body that is no JSON object has other messages, one of them for a ``content_type`` (the request's
    header) that is not JSON.
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
    """Return how far validation came before the pydantic error ``each``, as a sort key: depth, type, list indices."""
    places = tuple(part for part in each["loc"] if isinstance(part, int))
    return len(each["loc"]), not str(each["type"]).endswith("_type"), places


def as_if_sent(kind: type[Sent], fields: dict[str, Any]) -> Sent:
    """Build a request model of class ``kind`` from ``fields`` that were translated from another API.

    Raises:
        RequestValidationError: a field is invalid. The error's locations are those of a client that sent ``fields``.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error


def http_fault(error: HTTPException) -> Fault:
    """Return the error reply for an HTTPException of FastAPI or Starlette.

    If the exception's cause says why the body could not be read or parsed, the status is 400 and the message has the
    reason. Otherwise the reply has the exception's own status and detail.
    """
    reason = error.__cause__
    if isinstance(reason, UnicodeDecodeError):
        return Fault(400, f"the body is not text in UTF-8 (byte {reason.start})")
    if isinstance(reason, RecursionError):
        return Fault(400, "the body is nested too deeply")
    if isinstance(reason, ValueError):
        return Fault(400, f"the body cannot be read: {one_line(reason)}")
    return Fault(error.status_code, str(error.detail), code="body_too_large" if error.status_code == 413 else None)
