"""Request models: OpenAI's fields, extended by this server's own parameters."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from yggdrasil.acceptance.speculation import Exactness, RuleName
from yggdrasil.serving.field_aliases import translated, warnings_of

Item = TypeVar("Item")
# A list validated up to its first error: a body may hold millions, and an error for each takes a minute and gigabytes.
Several = Annotated[list[Item], Field(fail_fast=True)]
Token = Annotated[int, Field(ge=0)]
NO_LIMIT = -1  # turns top_k off in vLLM, and sets no token limit in llama.cpp and LM Studio
# Bounded, because products of numbers with thousands of digits cannot be printed.
Count = Annotated[int, Field(ge=1, lt=2**31)]


def _without_limit(value: Any) -> Any:
    return None if type(value) is int and value == NO_LIMIT else value


Limit = BeforeValidator(_without_limit)  # turns NO_LIMIT into None


class Wire(BaseModel):
    """Base of all request models: strict types, unknown fields ignored. A null field has its default."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class SpeculationFields(Wire):
    """The fields of ``yggdrasil.Speculation`` for one request. Unset fields have the defaults of that class."""

    rule: RuleName | None = None
    expansion: Several[Count] | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    relaxed_topk: int | None = None
    relaxed_delta: float | None = None
    thinking_only: bool | None = None
    exactness: Exactness | None = None
    tolerance: float | None = None
    fixed_width: int | None = None
    audit: bool | None = None


class SchemaFormat(Wire):
    """The ``json_schema`` object of ``response_format``: the JSON schema that the answer must match."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(Wire):
    """The format of the answer: text, any JSON object, or JSON that matches a schema.

    Some clients send ``json_object`` with a ``schema``.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class StreamOptions(Wire):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


def _numbers_alone(biases: Any) -> Any:
    """Reject the first bias that is no number: pydantic has no ``fail_fast`` for dictionaries."""
    for token, bias in biases.items() if isinstance(biases, dict) else ():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            shown = repr(token[:20])  # a lone surrogate could not be encoded in the reply
            raise PydanticCustomError("no_number", "the bias of {token} is no number", {"token": shown})
    return biases


class DecodingFields(Wire):
    """Fields that chat completions and completions share. Field names of vLLM and llama.cpp are translated."""

    model_config = ConfigDict(extra="allow")

    _translated = model_validator(mode="before")(translated)

    @property
    def warnings(self) -> list[str]:
        """One sentence for each ignored unknown field that may have been meant to change the answer; at most 16."""
        return warnings_of(self.model_extra)

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, Limit] = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_numbers_alone)] = None
    bad_words: Several[str] | None = None
    min_new_tokens: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Count | None = None
    stop: str | Several[str] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[Several[str], Field(min_length=1)] | None = None  # the answer is one of these texts
    stop_token_ids: Several[Token] | None = None
    speculation: bool | SpeculationFields | None = None
    user: str | None = None


def _text_alone(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError("no_text", "the model reads text alone; leave out parts of another type")
    return kind


class TextPart(Wire):
    """A content part of a message. Only text is supported."""

    type: Annotated[Literal["text"], BeforeValidator(_text_alone)]
    text: str


class CalledFunction(Wire):
    """A function that the assistant called."""

    name: str
    arguments: str = "{}"


class ToolCall(Wire):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def arguments(self) -> Any:
        """The call's arguments parsed from JSON, as chat templates expect; the text itself if it is not valid JSON."""
        try:
            return json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            return self.function.arguments


class ChatMessage(Wire):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[TextPart] | None = None
    tool_calls: Several[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content of the message as one text, with parts concatenated; empty without content."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionFields(Wire):
    """A function that the model may call. ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionFields


class ChosenName(Wire):
    """The name of the function that must be called."""

    name: str


class ChosenTool(Wire):
    """A ``tool_choice`` that requires a call of one tool."""

    type: Literal["function"] = "function"
    function: ChosenName


class AllowedTools(Wire):
    """The subset of the request's tools that may be called. Mode ``required`` requires a call."""

    mode: Literal["auto", "required"]
    tools: Annotated[Several[ChosenTool], Field(min_length=1)]


class AllowedChoice(Wire):
    """A ``tool_choice`` that restricts the tools to a subset."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(DecodingFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[Several[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Limit] = None
    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Limit] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Several[Tool] | None = None
    show_trees: bool | None = None  # stream the token tree of each iteration, too
    chat_template_kwargs: dict[str, Any] | None = None  # further template variables
    continue_final_message: bool | None = None  # default: whether the last message is the assistant's
    add_generation_prompt: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedChoice | None = None

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message instead of beginning a new one.

        It does if that message is an assistant's with text and without tool calls, unless ``continue_final_message`` is
        False or ``add_generation_prompt`` is True.
        """
        last = self.messages[-1]
        is_begun = last.role == "assistant" and bool(last.text) and not last.tool_calls
        return is_begun and self.continue_final_message is not False and not self.add_generation_prompt


class CompletionRequest(DecodingFields):
    """The body of ``POST /v1/completions``. The prompt is a text, token ids, or a list of either."""

    prompt: str | Several[str] | Several[Token] | Several[Several[Token]]
    max_tokens: Annotated[int, Field(ge=NO_LIMIT)] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(Wire):
    """The body of ``POST /tokenize``: a text, as ``prompt`` (vLLM) or ``content`` (llama.cpp), or a chat."""

    prompt: str | None = None
    content: str | None = None
    messages: Several[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Wire):
    """The body of ``POST /detokenize``."""

    tokens: Several[Token]
