"""Faults as a client sees them: OpenAI's error object and the right status."""

from typing import Any

from pydantic import BaseModel

from yggdrasil.errors import YggdrasilError

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 503: "unavailable_error",
}  # fmt: skip


class ErrorBody(BaseModel):
    """The object under ``error``."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorReply(BaseModel):
    """Every answer that is no success."""

    error: ErrorBody


class Fault(Exception):
    """A request ends with this status and sentence; ``more`` are further fields of the error object."""

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

    def body(self) -> dict[str, Any]:
        """The reply, as ``ErrorReply``."""
        error = ErrorBody(message=self.message, type=self.kind, param=self.param, code=self.code)
        return {"error": {**error.model_dump(), **self.more}}


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def context_fault(prompt_tokens: int, limit: int, *, is_whole: bool = True) -> Fault:
    """The prompt leaves no room for an answer; both numbers are said, the first as a bound if not ``is_whole``."""
    count = f"{'' if is_whole else 'more than '}{prompt_tokens}"
    return Fault(
        400,
        f"the prompt has {count} tokens, the context holds {limit} and an answer needs one at least; shorten it",
        kind="exceed_context_size_error", code="context_length_exceeded",
        more={"n_prompt_tokens": prompt_tokens, "n_ctx": limit},
    )  # fmt: skip


def fault_of(error: BaseException) -> Fault:
    """What a client is told of an error: its sentence if it is one that the request can mend, else that it was ours."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, YggdrasilError):
        is_ours = any(sign in str(error) for sign in ("not finite", "fault of ours"))
        return Fault(500 if is_ours else 400, str(error))
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return Fault(500, "the server ran out of memory on this request; shorten it")
    return Fault(500, f"the server failed on this request ({type(error).__name__}); its log has the details")
