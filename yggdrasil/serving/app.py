"""The FastAPI application: routes, middleware, and exception handlers that reply in OpenAI's or Ollama's error form."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from yggdrasil import __version__
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving.errors import ClientGone, ErrorReply, Fault, fault_of, http_fault, invalid_fault
from yggdrasil.serving.middleware import Guard, HeadAsGet
from yggdrasil.serving.routes import chat, completions, general, ollama, responses
from yggdrasil.serving.server_settings import ServerSettings
from yggdrasil.serving.service import Service
from yggdrasil.serving.worker import Worker

_ERRORS = {"4XX": {"model": ErrorReply, "description": "The request is invalid"},
           "5XX": {"model": ErrorReply, "description": "The server failed or is not ready"}}  # fmt: skip


def create_app(worker: Worker, settings: ServerSettings, model: str) -> ASGIApp:
    """Build the ASGI application of the server: the endpoints of OpenAI's and Ollama's APIs.

    The application's lifespan starts and stops ``worker``.

    Args:
        worker: the thread that decodes queued requests.
        settings: API key, allowed origins and hosts, and limits of requests.
        model: the name under which the model is served.
    """
    app = _routed(worker, settings, model)
    if not settings.cors_origins:
        return app
    # CORS must wrap the whole application: Starlette's handler of unexpected errors is outside all added middleware.
    return CORSMiddleware(
        app, allow_origins=settings.cors_origins, allow_methods=["GET", "HEAD", "POST"], allow_headers=["*"]
    )


def _routed(worker: Worker, settings: ServerSettings, model: str) -> FastAPI:

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_in_threadpool(worker.stop)

    app = FastAPI(
        title="Yggdrasil", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        responses=_ERRORS,  # type: ignore[arg-type]
    )  # fmt: skip
    app.state.service = Service(worker, settings, model)
    for routes in (chat, completions, responses, ollama, general):
        app.include_router(routes.router)
    app.add_middleware(
        Guard, api_key=settings.api_key, host_names=settings.host_names, body_bytes=settings.limits.body_bytes
    )
    app.add_middleware(HeadAsGet)
    for kind in (Fault, YggdrasilError):
        app.add_exception_handler(kind, _answer_fault)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.add_exception_handler(ClientGone, _answer_nobody)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    return app


async def _answer_fault(request: Request, error: Exception) -> Response:
    fault = fault_of(error)
    return JSONResponse(fault.body(request.url.path), fault.status, fault.headers)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    """Reply to an unexpected error with ``Connection: close``, because uvicorn closes the connection afterwards."""
    fault = fault_of(error)
    return JSONResponse(fault.body(request.url.path), fault.status, {**fault.headers, "Connection": "close"})


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _answer_fault(request, invalid_fault(error, request.headers.get("content-type", "")))


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    fault = http_fault(error)
    return JSONResponse(fault.body(request.url.path), fault.status, error.headers)
