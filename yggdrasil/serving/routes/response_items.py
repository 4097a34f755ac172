"""Translates requests of ``/v1/responses`` to requests of ``/v1/chat/completions``."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from yggdrasil.serving.errors import Fault, as_if_sent
from yggdrasil.serving.request_fields import ChatRequest, Several, Wire


class TextFormat(Wire):
    """The ``text.format`` object: the format that the answer must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Wire):
    """The ``text`` object of a request."""

    format: TextFormat | None = None


class ResponseRequest(Wire):
    """The body of ``POST /v1/responses``. Other fields become fields of the chat request."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | Several[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None


def chat_of(body: ResponseRequest) -> ChatRequest:
    """Translate a request of ``/v1/responses`` to a chat request.

    Raises:
        Fault: an item or a tool is of an unsupported type, or ``previous_response_id`` is set.
        RequestValidationError: a field is invalid.
    """
    if body.previous_response_id is not None:
        raise Fault(
            400, "answers are not stored here; send the earlier turns in input, and leave out previous_response_id",
            param="previous_response_id",
        )  # fmt: skip
    extra = body.model_extra or {}
    if extra.get("n") not in (None, 1):
        raise Fault(400, "a response has one answer; leave out n", param="n")
    fields: dict[str, Any] = {
        "messages": _messages(body), "max_tokens": body.max_output_tokens, "stream": body.stream,
        "tools": _tools(body.tools), "tool_choice": _choice(body.tool_choice), "response_format": _format(body.text),
    }  # fmt: skip
    fields |= {name: value for name, value in extra.items() if name not in fields}
    return as_if_sent(ChatRequest, fields)


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if body.instructions:
        turns.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        _add_item(turns, number, item)
    return turns


def _add_item(turns: list[dict[str, Any]], number: int, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        turns.append({"role": item.get("role"), "content": _content(number, item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if turns and turns[-1]["role"] == "assistant":  # text and calls of one answer are one message
            turns[-1].setdefault("tool_calls", []).append(call)
        else:
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        content = _content(number, item.get("output"))
        turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":
        raise Fault(400, f"input {number + 1} is of the type {str(kind)[:40]!r}, which is not served", param="input")


def _content(number: int, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text"):
            raise Fault(
                400, f"input {number + 1} holds more than text, which is all that the model reads", param="input"
            )
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    for tool in tools or ():
        if tool.get("type") != "function":
            raise Fault(400, f"tools hold a {str(tool.get('type'))[:40]!r}; functions are all there are", param="tools")
    names = ("name", "description", "parameters")
    return tools and [{"type": "function", "function": {name: tool.get(name) for name in names}} for tool in tools]


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        chosen = [_choice(tool) for tool in choice.get("tools") or () if isinstance(tool, dict)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": chosen}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    wanted = None if text is None else text.format
    if wanted is None:
        return None
    schema = None if wanted.schema_ is None else {"name": wanted.name, "schema": wanted.schema_}
    return {"type": wanted.type, "json_schema": schema}
