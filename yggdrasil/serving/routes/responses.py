"""Route ``POST /v1/responses``: OpenAI's responses API, as one object or as a stream of named events."""

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from yggdrasil.engine.request import Generation
from yggdrasil.serving.errors import Fault
from yggdrasil.serving.exchange import Exchange, answer
from yggdrasil.serving.jobs import Finished
from yggdrasil.serving.replies import ToolCallReply
from yggdrasil.serving.routes.chat import AnswerStream, Chat
from yggdrasil.serving.routes.response_items import ResponseRequest, chat_of
from yggdrasil.serving.service import service_of
from yggdrasil.serving.streams import STREAMED, Framing, named_frame
from yggdrasil.serving.usage import finish_reason, timings_of, usage_of

router = APIRouter()


@router.post("/v1/responses", responses=STREAMED)
@router.post("/responses", include_in_schema=False)
async def responses(body: ResponseRequest, request: Request) -> Response:
    """Answer a request of the responses API. Responses are not stored."""
    service = service_of(request)
    identity = service.identify("resp", body.model)
    chat = await run_in_threadpool(Chat.of, chat_of(body), service, identity)
    exchange = Exchange(service.worker, request, chat.jobs, is_streamed=bool(body.stream))
    writer = _Writer(body, chat)
    return await answer(
        exchange, lambda found: writer.whole(found[0].result), writer.events, Framing(named_frame, writer.fault)
    )


class _Writer:
    """Builder of the response object of one answer, and of the events that stream it."""

    def __init__(self, body: ResponseRequest, chat: Chat) -> None:
        self._body, self._chat = body, chat
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._number = -1

    def whole(self, result: Generation) -> dict[str, Any]:
        """Return the ``response`` object (OpenAI's responses API) of a finished answer."""
        content, calls = self._chat.parse(result.text)
        message = [self._message(content)] if content or not calls else []
        return self._object(result, [*message, *map(_call, calls)])

    def _object(self, result: Generation | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response object; without ``result`` its status is ``in_progress``."""
        identity, chat, body = self._chat.identity, self._chat.body, self._body
        is_cut = result is not None and finish_reason(result) == "length"
        status = "in_progress" if result is None else "incomplete" if is_cut else "completed"
        return {
            "id": identity.id, "object": "response", "created_at": float(identity.created), "model": identity.model,
            "status": status, "error": None, "output": output, "instructions": body.instructions,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "parallel_tool_calls": True,
            "previous_response_id": None, "store": False, "temperature": chat.temperature, "top_p": chat.top_p,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": body.tool_choice or "auto", "tools": [{"strict": None, **tool} for tool in body.tools or ()],
            **({} if result is None else self._figures(result)),
        }  # fmt: skip

    def _figures(self, result: Generation) -> dict[str, Any]:
        usage, plan = usage_of([result], 1), self._chat.service.decoder.plan
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "usage": {
                "input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens, "output_tokens_details": {"reasoning_tokens": 0},
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            },
            "timings": timings_of([result], plan).model_dump(), "warnings": self._chat.warnings,
        }  # fmt: skip

    def _message(self, text: str | None, status: str = "completed") -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        message = {"id": self._message_id, "type": "message", "role": "assistant"}
        return {**message, "status": status, "content": content}

    async def events(self, exchange: Exchange) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the events of a streamed answer in the order of OpenAI's responses API."""
        answer, text = AnswerStream(self._chat, 0), ""
        begun = self._object(None, [])
        yield [self._event("created", response=begun), self._event("in_progress", response=begun)]
        async for _, event in exchange.events():
            deltas = list(answer.deltas(event))
            if isinstance(event, Finished):
                deltas.append(answer.end(event.result))
            said = "".join(delta["delta"].get("content") or "" for delta in deltas)
            events = [*self._opened(), self._text("delta", delta=said)] if said and not text else []
            events = [self._text("delta", delta=said)] if said and text else events
            text += said
            if isinstance(event, Finished):
                events += self._ending(event.result, text, deltas[-1]["delta"])
            yield events

    def fault(self, fault: Fault) -> dict[str, Any]:
        """Return the event that ends the stream of an answer that failed."""
        said = {"message": fault.message, "code": fault.code, "param": fault.param}
        return {**self._event("", **said), "type": "error"}

    def _ending(self, result: Generation, text: str, last: dict[str, Any]) -> Iterator[dict[str, Any]]:
        calls = [ToolCallReply.model_validate(call) for call in last.get("tool_calls", ())]
        output = []
        if text or not calls:
            if not text:
                yield from self._opened()
            yield self._text("done", text=text)
            yield self._event("content_part.done", **self._place, part=_part(text))
            output.append(self._message(text))
            yield self._event("output_item.done", output_index=0, item=output[0])
        for call in calls:
            item, place = _call(call), len(output)
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("output_item.added", output_index=place, item=begun)
            name = "function_call_arguments"
            where = {"item_id": item["id"], "output_index": place}
            yield self._event(f"{name}.delta", **where, delta=call.function.arguments)
            yield self._event(f"{name}.done", **where, arguments=call.function.arguments, name=call.function.name)
            yield self._event("output_item.done", output_index=place, item=item)
            output.append(item)
        whole = self._object(result, output)
        yield self._event(whole["status"], response=whole)

    def _opened(self) -> list[dict[str, Any]]:
        return [
            self._event("output_item.added", output_index=0, item=self._message(None, "in_progress")),
            self._event("content_part.added", **self._place, part=_part("")),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _text(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(f"output_text.{kind}", **self._place, logprobs=[], **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **more}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCallReply) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": f"fc_{call.id}", "call_id": call.id, "type": "function_call", "status": "completed", **function}
