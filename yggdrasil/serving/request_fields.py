"""What clients send: OpenAI's fields, and beside them every parameter of our own."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from yggdrasil.acceptance.speculation import Exactness, RuleName
from yggdrasil.serving.field_aliases import translated, warnings_of

Item = TypeVar("Item")
# A list up to its first fault: a body may hold millions, and an error for each takes a minute and gigabytes.
Several = Annotated[list[Item], Field(fail_fast=True)]
Token = Annotated[int, Field(ge=0)]
NO_LIMIT = -1  # to clients of vLLM a top_k that is off, to those of llama.cpp and LM Studio an answer without an end
# Numbers of thousands of digits have products that cannot even be told.
Count = Annotated[int, Field(ge=1, lt=2**31)]


def _without_limit(value: Any) -> Any:
    return None if type(value) is int and value == NO_LIMIT else value


Limit = BeforeValidator(_without_limit)  # None where it is said in that way that there is none


class Wire(BaseModel):
    """Types are as written: a text is no number. What a client leaves out or sends as null has its default."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class SpeculationFields(Wire):
    """``yggdrasil.Speculation`` for one request; what is left out is as there."""

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
    """A schema that the answer must match."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(Wire):
    """Free text, any JSON object, or JSON of a schema, which some clients send with the former."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class StreamOptions(Wire):
    """What a stream shows beside the text."""

    include_usage: bool | None = None


def _numbers_alone(biases: Any) -> Any:
    """As ``Several``, which dictionaries have no word for."""
    for token, bias in biases.items() if isinstance(biases, dict) else ():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            shown = repr(token[:20])  # with half of a surrogate pair the sentence could not be sent
            raise PydanticCustomError("no_number", "the bias of {token} is no number", {"token": shown})
    return biases


class DecodingFields(Wire):
    """Fields that both kinds of completion take, under our names or other servers'; ``warnings`` names unknown ones."""

    model_config = ConfigDict(extra="allow")

    _translated = model_validator(mode="before")(translated)

    @property
    def warnings(self) -> list[str]:
        """What of the request was ignored."""
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
    """A part of a message; text is all that is understood."""

    type: Annotated[Literal["text"], BeforeValidator(_text_alone)]
    text: str


class CalledFunction(Wire):
    """A function that the assistant called."""

    name: str
    arguments: str = "{}"


class ToolCall(Wire):
    """One call, as answers hold it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def arguments(self) -> Any:
        """The arguments as what they stand for: templates write them as JSON themselves."""
        try:
            return json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            return self.function.arguments


class ChatMessage(Wire):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[TextPart] | None = None
    tool_calls: Several[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionFields(Wire):
    """A function that may be called."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """A tool; functions are all there are."""

    type: Literal["function"]
    function: FunctionFields


class ChosenName(Wire):
    """The name of the function that must be called."""

    name: str


class ChosenTool(Wire):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: ChosenName


class AllowedTools(Wire):
    """The tools that may be called, of those that are given, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[Several[ChosenTool], Field(min_length=1)]


class AllowedChoice(Wire):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(DecodingFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[Several[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Limit] = None
    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Limit] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Several[Tool] | None = None
    show_trees: bool | None = None  # a stream has chunks with the token tree of each iteration, too
    chat_template_kwargs: dict[str, Any] | None = None  # further names that the template may read
    continue_final_message: bool | None = None  # left out: where the last message is the assistant's
    add_generation_prompt: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedChoice | None = None

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message instead of following it."""
        last = self.messages[-1]
        is_begun = last.role == "assistant" and bool(last.text) and not last.tool_calls
        return is_begun and self.continue_final_message is not False and not self.add_generation_prompt


class CompletionRequest(DecodingFields):
    """``POST /v1/completions``: a text, texts, tokens, or lists of tokens."""

    prompt: str | Several[str] | Several[Token] | Several[Several[Token]]
    max_tokens: Annotated[int, Field(ge=NO_LIMIT)] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(Wire):
    """``POST /tokenize``: a text, under either of the names that clients use, or a chat."""

    prompt: str | None = None
    content: str | None = None
    messages: Several[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Wire):
    """``POST /detokenize``."""

    tokens: Several[Token]
