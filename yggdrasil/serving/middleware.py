"""ASGI middleware of every route: API key, host name and body size checks, and HEAD requests as GET."""

import hmac
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yggdrasil.serving.errors import Fault

# Paths that need no API key: they reveal only that there is a server and which model it serves.
PUBLIC = {"/", "/health", "/v1/health", "/models", "/v1/models"}


class Guard:
    """Middleware that rejects requests without the API key, with a foreign Host header or with too large a body.

    The statuses are 401, 403 and 413. If ``api_key`` is None, no key is needed; if ``host_names`` is empty, every Host
    header is accepted.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, host_names: Sequence[str], body_bytes: int) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._names, self._body_bytes = set(host_names), body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        fault = self._fault(scope, headers)
        if fault is not None:
            await JSONResponse(fault.body(scope["path"]), fault.status)(scope, receive, send)
            return
        await self._app(_as_json(scope, headers), self._counted(receive), send)

    def _fault(self, scope: Scope, headers: Headers) -> Fault | None:
        # Against DNS rebinding: another site's page may resolve its own name to this machine.
        if self._names and _name_of(headers.get("host", "")) not in self._names:
            return Fault(403, "this server is not called by that name; use localhost, or start it with --api-key")
        if self._key is not None and scope["path"] not in PUBLIC and scope["method"] != "OPTIONS":
            given = headers.get("authorization", "")
            key = given[7:] if given.lower().startswith("bearer ") else headers.get("x-api-key", "")
            if not hmac.compare_digest(key.encode("latin-1"), self._key):
                return Fault(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Fault:
        return Fault(413, f"the body is larger than {self._body_bytes} bytes", code="body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._body_bytes:
                raise HTTPException(413, self._too_large().message)  # FastAPI lets only this type through
            return message

        return counting


class HeadAsGet:
    """Middleware that routes HEAD requests as GET. uvicorn's protocol omits the body of the reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if asks_head else scope, receive, send)


def _as_json(scope: Scope, headers: Headers) -> Scope:
    """Return ``scope`` with the Content-Type application/json for a POST request without an Origin header.

    Other requests are unchanged. ``curl -d``, as in Ollama's examples, sends JSON with the Content-Type of a form. A
    web page may send a form to any site, but its browser adds the Origin header.
    """
    if scope["method"] != "POST" or "origin" in headers or "json" in headers.get("content-type", ""):
        return scope
    others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def _name_of(host: str) -> str:
    """Return the host name of a Host header, in lower case and without the port."""
    host = host.lower()
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
