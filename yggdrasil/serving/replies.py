"""What clients get, as far as it is not a stream: OpenAI's objects, with ``timings`` beside them."""

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those that an earlier request had left in the caches."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Timings(BaseModel):
    """Where the time went, under the names that llama.cpp's clients read and more of our own. Milliseconds."""

    prompt_n: int  # tokens of the prompt that were read
    cache_n: int  # and those that were not, because the caches held them
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int
    iterations: int
    accepted_length: float  # tokens an iteration gives, the bonus token included
    stage_ms: dict[str, float]
    plain_ms: float | None  # what ``predicted_ms`` would have been without speculation, by the plan's measured costs
    rule: str
    lossless: bool


class TopLogprob(BaseModel):
    """One token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that came, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    """A call, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(BaseModel):
    """One call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    """One of ``n`` answers."""

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
    warnings: list[str] = []  # what of the request was ignored


class CompletionLogprobs(BaseModel):
    """Log-probabilities token by token; null where a token has nothing before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continued text."""

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
    warnings: list[str] = []  # what of the request was ignored


class ModelCard(BaseModel):
    """The one model there is."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "yggdrasil"
    meta: dict[str, Any]


class ModelList(BaseModel):
    """The reply of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """The reply of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    """The reply of ``/detokenize``, under both names that clients read."""

    content: str
    prompt: str


class Health(BaseModel):
    """The reply of ``/health``."""

    status: Literal["ok"] = "ok"
