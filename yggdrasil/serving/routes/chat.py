"""Route ``POST /v1/chat/completions``."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from yggdrasil.engine.request import Generation
from yggdrasil.serving.chunks import ChunkWriter, shown_tree
from yggdrasil.serving.decoding_options import options_of, with_recommended_sampling
from yggdrasil.serving.errors import Fault
from yggdrasil.serving.exchange import Exchange, JobRequest, answer
from yggdrasil.serving.jobs import Event, Finished, Piece
from yggdrasil.serving.logprobs import chat_logprobs
from yggdrasil.serving.replies import AssistantMessage, ChatChoice, ChatCompletion
from yggdrasil.serving.request_fields import AllowedChoice, ChatRequest, ChosenTool, Tool
from yggdrasil.serving.service import Identity, Service, service_of
from yggdrasil.serving.streams import STREAMED, TextFrames
from yggdrasil.serving.tokenization import turns_of
from yggdrasil.serving.tools import Parsed, ToolFormat
from yggdrasil.serving.usage import finish_reason, timings_of, usage_of

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
@router.post("/chat/completions", response_model=ChatCompletion, include_in_schema=False)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat in the model's chat template, as one object or as server-sent events."""
    service = service_of(request)
    identity = service.identify("chatcmpl", body.model)
    chat = await run_in_threadpool(Chat.of, body, service, identity)
    exchange = Exchange(service.worker, request, chat.jobs, is_streamed=bool(body.stream), frame=chat.frame)
    return await answer(exchange, lambda found: chat.reply([each.result for each in found]).model_dump(), chat.chunks)


@dataclass(frozen=True)
class Chat:
    """A validated chat request, which builds its jobs and its reply."""

    body: ChatRequest
    service: Service
    identity: Identity
    jobs: list[JobRequest]
    tools: ToolFormat | None  # how to parse tool calls; None if the answer cannot have any

    @classmethod
    def of(cls, body: ChatRequest, service: Service, identity: Identity) -> "Chat":
        """Tokenise a chat request and build its answers' jobs.

        Raises:
            Fault: the request is invalid or exceeds a limit.
            YggdrasilError: a value is out of its range, or the chat template or the constraint fails.
        """
        limits = service.settings.limits
        if (body.n or 1) > limits.answers:
            raise Fault(400, f"n is {body.n}; at most {limits.answers} answers are given", param="n")
        tools = _offered(body)
        if tools is None and _must_call(body):
            raise Fault(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
        written = service.tool_format if tools else None
        constraint = written.constraint(_callable(body, tools)) if written and tools and _must_call(body) else None
        if body.continue_final_message and not body.continues:
            raise Fault(
                400, "continue_final_message needs a last message of the assistant's, with a text",
                param="continue_final_message",
            )  # fmt: skip
        tokens = service.texts.encode_chat(
            turns_of(body.messages), tools, continues=body.continues, variables=body.chat_template_kwargs
        )
        prompt = service.texts.check(tokens)
        longest = body.max_completion_tokens or body.max_tokens or service.texts.limit
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        # JSON of a response_format is the requested content, even if it looks like a call.
        is_formed = body.response_format is not None and body.response_format.type != "text"
        read = None if is_formed else written
        jobs = [
            JobRequest(
                prompt,
                options_of(
                    with_recommended_sampling(body, service.sampling.params),
                    limits,
                    max_new_tokens=longest,
                    choice=i,
                    logprobs=logprobs,
                    constraint=constraint,
                    begins_turn=not body.continues,
                    keeps_special=read is not None and read.reads_special,
                ),
                shows_trees=bool(body.show_trees and body.stream),
            )
            for i in range(body.n or 1)
        ]
        service.check_constraint(jobs)
        return cls(body, service, identity, jobs, read)

    def reply(self, results: list[Generation]) -> ChatCompletion:
        """Return the reply to a chat request; ``results`` are all its answers, in the order of their indices."""
        return ChatCompletion(
            **self.identity._asdict(), choices=[self._choice(i, each) for i, each in enumerate(results)],
            usage=usage_of(results, len(self.jobs)), timings=timings_of(results, self.service.decoder.plan),
            warnings=self.warnings,
        )  # fmt: skip

    def _choice(self, index: int, result: Generation) -> ChatChoice:
        content, calls = self.parse(result.text)
        message = AssistantMessage(content=None if calls and not content else content, tool_calls=calls or None)
        logprobs = None if result.logprobs is None else chat_logprobs(self.service.texts, result.logprobs)
        reason = "tool_calls" if calls else finish_reason(result)
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=reason)

    @property
    def warnings(self) -> list[str]:
        """Sentences on parts of the request that the server ignored.

        These are unknown fields that may change the answer (at most 16), and earlier tool calls if the chat template
        leaves them out.
        """
        warnings = self.body.warnings
        template = str(self.service.decoder.tokenizer.chat_template)
        if any(message.tool_calls for message in self.body.messages) and "tool_calls" not in template:
            warnings.append("the model's chat template leaves out earlier tool calls")
        return warnings

    def parse(self, text: str) -> Parsed:
        """Split the text of a finished answer into content and tool calls.

        If the answer cannot have calls (``tools`` is None), the whole text is content.
        """
        return Parsed(text, []) if self.tools is None else self.tools.parse(text, self._names)

    @property
    def _names(self) -> set[str]:
        return {tool.function.name for tool in _offered(self.body) or ()}

    async def chunks(self, exchange: Exchange) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the chunks of a streamed reply: role, text as it becomes final, complete tool calls, finish reason."""
        writer, streams = self._chunks(), [AnswerStream(self, i) for i in range(len(self.jobs))]
        results: list[Generation] = []
        async for index, event in exchange.events():
            chunks = [writer.chunk([delta]) for delta in streams[index].deltas(event)]
            if isinstance(event, Piece) and event.trees:
                chunks.append(writer.chunk([], trees=[shown_tree(self.service.texts, tree) for tree in event.trees]))
            if isinstance(event, Finished):
                results.append(event.result)
                chunks.append(writer.end(streams[index].end(event.result), results, len(self.jobs)))
            yield chunks
        if writer.shows_usage:
            yield [writer.usage(results, len(self.jobs))]

    @property
    def frame(self) -> TextFrames | None:
        """Encoder of text that the decoder's thread may send; None with several answers, tools, logprobs or trees."""
        if len(self.jobs) > 1 or self.tools is not None or self.body.logprobs or self.body.show_trees:
            return None
        writer = self._chunks()
        return TextFrames(lambda text: writer.chunk([_choice(0, {"content": text})]))

    def _chunks(self) -> ChunkWriter:
        plan, body = self.service.decoder.plan, self.body
        return ChunkWriter(self.identity, "chat.completion.chunk", body.stream_options, plan, self.warnings)


class AnswerStream:
    """State of one streamed answer. Text that may be part of a tool call is held back."""

    def __init__(self, chat: Chat, index: int) -> None:
        self._chat, self._index = chat, index
        self._text = ""
        self._sent = 0
        self._has_begun = False

    def deltas(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield the choices of the chunks that ``event`` of the answer gives, in order; there may be none.

        The first event gives the role. Text that may be part of a tool call is held back.
        """
        if not self._has_begun:
            self._has_begun = True
            yield _choice(self._index, {"role": "assistant", "content": ""})
        if not isinstance(event, Piece):
            return
        self._text += event.text
        tools, logprobs = self._chat.tools, None
        text = self._text if tools is None else tools.decided(self._text)
        if event.logprobs:
            logprobs = chat_logprobs(self._chat.service.texts, event.logprobs).model_dump()
        if len(text) > self._sent or logprobs:
            yield _choice(self._index, {"content": text[self._sent :]}, logprobs=logprobs)
            self._sent = max(len(text), self._sent)

    def end(self, result: Generation) -> dict[str, Any]:
        """Return the last choice of a streamed answer: tool calls or text that was held back, and the finish reason."""
        parsed = self._chat.parse(self._text)
        delta: dict[str, Any] = {}
        if len(parsed.content) > self._sent:
            delta["content"] = parsed.content[self._sent :]
        if parsed.calls:
            delta["tool_calls"] = [{"index": i, **call.model_dump()} for i, call in enumerate(parsed.calls)]
        return _choice(self._index, delta, reason="tool_calls" if parsed.calls else finish_reason(result))


def _choice(index: int, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _offered(body: ChatRequest) -> list[Tool] | None:
    """Return the tools that may be called; None if there are none.

    Raises:
        Fault: ``tool_choice`` names an unknown tool.
    """
    if not body.tools or body.tool_choice == "none":
        return None
    if not isinstance(body.tool_choice, AllowedChoice):
        return body.tools
    given = {tool.function.name: tool for tool in body.tools}
    names = [tool.function.name for tool in body.tool_choice.allowed_tools.tools]
    if unknown := [name for name in names if name not in given]:
        raise Fault(400, f"tool_choice allows {unknown[0]!r}, which is none of the tools", param="tool_choice")
    return [given[name] for name in names]


def _must_call(body: ChatRequest) -> bool:
    if isinstance(body.tool_choice, AllowedChoice):
        return body.tool_choice.allowed_tools.mode == "required"
    return body.tool_choice == "required" or isinstance(body.tool_choice, ChosenTool)


def _callable(body: ChatRequest, tools: list[Tool]) -> list[Tool]:
    """Return the tools that a required call may name: all of ``tools``, or the one that ``tool_choice`` names.

    Raises:
        Fault: ``tool_choice`` names an unknown tool.
    """
    if not isinstance(body.tool_choice, ChosenTool):
        return tools
    name = body.tool_choice.function.name
    chosen = [tool for tool in tools if tool.function.name == name]
    if not chosen:
        raise Fault(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    return chosen
