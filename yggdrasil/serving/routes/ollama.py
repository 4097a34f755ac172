"""Routes of Ollama's API: ``/api/chat``, ``/api/generate``, and what clients ask about the served model."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from yggdrasil import __version__
from yggdrasil.engine.request import Generation
from yggdrasil.serving.errors import Fault, as_if_sent
from yggdrasil.serving.exchange import Exchange, answer
from yggdrasil.serving.jobs import Finished
from yggdrasil.serving.request_fields import NO_LIMIT, ChatRequest, Several, Tool, Wire
from yggdrasil.serving.routes.chat import AnswerStream, Chat
from yggdrasil.serving.service import Identity, Service, service_of
from yggdrasil.serving.streams import LINES
from yggdrasil.serving.tools import ToolFormat
from yggdrasil.serving.usage import finish_reason, timings_of

router = APIRouter()
_LATEST = ":latest"  # Ollama's clients append it to a name without a tag


class CalledFunction(Wire):
    """A called function; ``arguments`` is an object, not JSON text."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Called(Wire):
    """A tool call of an earlier assistant message."""

    function: CalledFunction


class OllamaMessage(Wire):
    """One message of an Ollama chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Several[str] | None = None
    tool_calls: Several[Called] | None = None
    tool_name: str | None = None


class OllamaModel(Wire):
    """A request that names the served model."""

    model: str


class OllamaRequest(OllamaModel):
    """The fields that chat and generate requests share."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaChatRequest(OllamaRequest):
    """The body of ``POST /api/chat``."""

    messages: Several[OllamaMessage]
    tools: Several[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """The body of ``POST /api/generate``. The prompt becomes a user message, as in Ollama."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None
    images: Several[str] | None = None


@router.post("/api/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a chat, as NDJSON or, if ``stream`` is false, as one object."""
    if not body.messages:
        return _loaded(body, request, {"message": {"role": "assistant", "content": ""}})
    fields = {"messages": [_turn(turn) for turn in body.messages]}
    if body.tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return await _answer(body, request, fields, _said)


@router.post("/api/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt as a user message, as NDJSON or, if ``stream`` is false, as one object."""
    if body.raw or body.suffix:
        raise Fault(400, "raw and suffix are not served here; use /v1/completions, which continues a text")
    _refuse_images(body.images)
    if not body.prompt:
        return _loaded(body, request, {"response": ""})
    turns = [{"role": "system", "content": body.system}] if body.system else []
    turns.append({"role": "user", "content": body.prompt})
    return await _answer(body, request, {"messages": turns}, lambda text, _: {"response": text})


def _loaded(body: OllamaRequest, request: Request, said: dict[str, Any]) -> Response:
    """Answer a request without a prompt. Ollama's clients send it to load the model, which is loaded already."""
    _identify(body, service_of(request))
    reply = {"model": body.model, "created_at": _when(None), **said, "done": True, "done_reason": "load"}
    return JSONResponse(reply)


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List the served model."""
    return {"models": [_card(service_of(request))]}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, Any]:
    """List the loaded model, which is always the served model."""
    card = _card(service_of(request))
    return {"models": [{**card, "expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}]}


@router.post("/api/show")
def show(body: OllamaModel, request: Request) -> dict[str, Any]:
    """Describe the served model."""
    service = service_of(request)
    _identify(body, service)
    template = str(getattr(service.decoder.tokenizer, "chat_template", None) or "")
    kind = str(service.decoder.assembly.target.loaded.config.get("model_type", ""))
    limit = service.decoder.assembly.engine.max_length
    return {
        "template": template, "details": _card(service)["details"], "modified_at": _when(service.started),
        "model_info": {"general.architecture": kind, f"{kind}.context_length": limit},
        "capabilities": ["completion", *(["tools"] if ToolFormat.of(service.decoder.tokenizer) else [])],
    }  # fmt: skip


def _card(service: Service) -> dict[str, Any]:
    """Describe the served model as an entry of Ollama's list of models."""
    facts = service.decoder.assembly.target.loaded
    plan = service.decoder.plan
    is_gguf = plan is not None and plan.target.source.endswith(".gguf")
    details = {"format": "gguf" if is_gguf else "", "family": "", "families": None}
    size = sum(tensor.nbytes for tensor in facts.tensors.values())
    return {
        "name": service.model, "model": service.model, "modified_at": _when(service.started), "size": size,
        "digest": service.fingerprint, "details": {**details, "parameter_size": "", "quantization_level": ""},
    }  # fmt: skip


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Return the server's version."""
    return {"version": __version__}


def _identify(body: OllamaModel, service: Service) -> Identity:
    """Return the identity of a reply. Raises Fault (status 404) if ``body`` names another model than the served one."""
    return service.identify("ollama", body.model.removesuffix(_LATEST))


async def _answer(body: OllamaRequest, request: Request, fields: dict[str, Any], said: Any) -> Response:
    service = service_of(request)
    identity = _identify(body, service)
    chat_request = as_if_sent(ChatRequest, {**fields, **_options(body.options or {}), **_format(body.format)})
    wanted = await run_in_threadpool(Chat.of, chat_request, service, identity)
    exchange = Exchange(service.worker, request, wanted.jobs, is_streamed=body.stream)

    def whole(found: list[Finished]) -> dict[str, Any]:
        text, calls = wanted.parse(found[0].result.text)
        return _line(body, said(text, [_called(call.model_dump()) for call in calls]), wanted, found[0].result)

    return await answer(exchange, whole, partial(_lines, body, said, wanted), LINES)


async def _lines(
    body: OllamaRequest, said: Any, wanted: Chat, exchange: Exchange
) -> AsyncIterator[list[dict[str, Any]]]:
    stream = AnswerStream(wanted, 0)
    async for _, event in exchange.events():
        deltas = list(stream.deltas(event))
        if isinstance(event, Finished):
            deltas.append(stream.end(event.result))
        text = "".join(delta["delta"].get("content") or "" for delta in deltas)
        calls = [_called(call) for delta in deltas for call in delta["delta"].get("tool_calls", ())]
        lines = [_line(body, said(text, calls), wanted)] if text or calls else []
        if isinstance(event, Finished):
            lines.append(_line(body, said("", []), wanted, event.result))
        yield lines


def _line(body: OllamaRequest, said: dict[str, Any], wanted: Chat, result: Generation | None = None) -> dict[str, Any]:
    """Return one object of the reply; with ``result`` the last one, with finish reason and durations in nanoseconds."""
    reply = {"model": body.model, "created_at": _when(None), **said, "done": result is not None}
    if result is None:
        return reply
    timings = timings_of([result], wanted.service.decoder.plan)
    read, written = round(1e6 * timings.prompt_ms), round(1e6 * timings.predicted_ms)
    return reply | {
        "done_reason": finish_reason(result), "total_duration": read + written, "load_duration": 0,
        "prompt_eval_count": result.prompt_tokens, "prompt_eval_duration": read, "eval_count": len(result.tokens),
        "eval_duration": written,
    }  # fmt: skip


def _said(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}}


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool call to Ollama's form, with the arguments as an object."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return {"id": call["id"], "function": {"name": function["name"], "arguments": arguments}}


def _turn(turn: OllamaMessage) -> dict[str, Any]:
    _refuse_images(turn.images)
    calls = [
        {"function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}}
        for call in turn.tool_calls or ()
    ]
    message: dict[str, Any] = {"role": turn.role, "content": turn.content or ""}
    if turn.tool_name is not None:
        message["name"] = turn.tool_name
    return {**message, "tool_calls": calls} if calls else message


def _refuse_images(images: list[str] | None) -> None:
    if images:
        raise Fault(400, "the model reads text alone; leave out images", param="images")


_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Translate Ollama's options to chat fields. All others, such as ``num_ctx`` and ``mirostat``, are ignored."""
    given = {name: options[name] for name in _SAME if options.get(name) is not None}
    for name in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"):
        if type(given.get(name)) is int:
            given[name] = float(given[name])
    if options.get("repeat_penalty") is not None:
        given["repetition_penalty"] = options["repeat_penalty"]
    longest = options.get("num_predict")
    if longest is not None:
        given["max_tokens"] = NO_LIMIT if type(longest) is int and longest < 0 else longest
    return given


def _format(wanted: Any) -> dict[str, Any]:
    if not wanted:
        return {}
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": wanted}}}


def _when(seconds: int | None) -> str:
    now = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return now.isoformat().replace("+00:00", "Z")
