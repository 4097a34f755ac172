"""Pydantic models of replies that are not streamed: OpenAI's objects, extended by ``timings`` and ``warnings``."""

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    """Number of prompt tokens whose KV entries were reused from earlier requests."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a request: prompt, completion and total."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Timings(BaseModel):
    """Timings of a request in milliseconds: the fields of llama.cpp, and fields of this server."""

    prompt_n: int  # prompt tokens prefilled
    cache_n: int  # prompt tokens reused from the KV cache
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int  # generated tokens; the times leave out the first
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int  # drafted tokens that the target verified
    draft_n_accepted: int
    iterations: int
    accepted_length: float  # mean tokens per iteration, bonus token included
    stage_ms: dict[str, float]  # stage of an iteration -> total milliseconds
    plain_ms: float | None  # estimate of ``predicted_ms`` without speculation, from the plan's costs
    rule: str  # the acceptance rule
    lossless: bool  # whether the output follows the target's own distribution


class TopLogprob(BaseModel):
    """A top-k alternative at one position, with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The generated token, with the top-k alternatives at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The ``logprobs`` object of a chat: one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    """The called function; ``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolCallReply(BaseModel):
    """One tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The message of an answer; ``content`` is null if the answer consists of tool calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    """One of the ``n`` answers to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """The reply of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    warnings: list[str] = []  # one sentence per ignored part of the request


class CompletionLogprobs(BaseModel):
    """Parallel lists with one entry per token; the log-probability of the prompt's first token is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(BaseModel):
    """The reply of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings
    warnings: list[str] = []  # one sentence per ignored part of the request


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "yggdrasil"
    meta: dict[str, Any]  # context length, vocabulary size, milliseconds of a plain step, default sampling


class ModelList(BaseModel):
    """The reply of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """The reply of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int  # context length in tokens


class Text(BaseModel):
    """The reply of ``/detokenize``: the same text as ``content`` (llama.cpp) and ``prompt`` (vLLM)."""

    content: str
    prompt: str


class Health(BaseModel):
    """The reply of ``/health``."""

    status: Literal["ok"] = "ok"
