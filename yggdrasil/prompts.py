"""Prompts and their tokens. Files are JSON lines with ``prompt`` or ``messages``, optional ``id`` and ``category``."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from yggdrasil.arguments import check_text
from yggdrasil.errors import ArgumentTypeError, YggdrasilError, first_line

if TYPE_CHECKING:
    from yggdrasil.checkpoints.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent / "assets" / "prompts"  # its README describes each file and its licence
Item = TypeVar("Item")
CHAT_PROMPTS, HELD_OUT_CHAT_PROMPTS = SHIPPED / "chat.jsonl", SHIPPED / "chat-heldout.jsonl"

Role = Literal["system", "user", "assistant"]
Messages: TypeAlias = "Sequence[Mapping[str, str] | Message]"


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """Return the message as a dictionary with the keys "role" and "content"."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Place:
    """File and line number that a prompt was read from."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


NOWHERE = Place("", 0)  # of a prompt that was not read from a file


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file: text to continue, or a chat to answer (then ``prompt`` is the text of its last turn)."""

    id: str
    prompt: str
    category: str | None = None
    messages: tuple[Message, ...] | None = None
    place: Place = field(default=NOWHERE, compare=False)

    def as_chat(self) -> "Prompt":
        """Return the prompt as a chat of one user message; a chat is returned unchanged."""
        if self.messages is not None:
            return self
        return replace(self, messages=(Message("user", self.prompt),))


NO_TEMPLATE = (
    "the model's tokenizer has no chat template, so it is no chat model: give a plain prompt, or an instruction-tuned "
    "model"
)
PROBE = (Message("user", "a"),)  # a chat that every template can render


@dataclass(frozen=True)
class BadLine:
    """A line of a prompt file that is not a valid prompt. ``reason`` is the error message with file and line."""

    id: str
    reason: str
    place: Place


def default_prompts(tokenizer: "Tokenizer") -> tuple[Path, bool]:
    """Return the shipped prompt file that calibrates a model with this tokenizer, and whether its prompts are chats.

    Models with a chat template get chats, others code to complete.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return (CHAT_PROMPTS, True) if has_template else (SHIPPED / "humaneval.jsonl", False)


def encode_prompt(tokenizer: "Tokenizer", prompt: Prompt | str) -> list[int]:
    """Return the token ids of a prompt, with the special tokens that the tokenizer adds to a text.

    A chat is rendered up to where the answer begins by the chat template, which writes its own special tokens.

    Raises:
        YggdrasilError: the text is not valid Unicode, or the prompt is a chat and the model has no chat template.
    """
    if isinstance(prompt, Prompt) and prompt.messages is not None:
        return encode_chat(tokenizer, prompt.messages)
    text = prompt if isinstance(prompt, str) else prompt.prompt
    check_text("the prompt", text)
    return tokenizer.encode(text)


def encode_prompts(tokenizer: "Tokenizer", prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of each prompt, as ``encode_prompt`` does; an error names the prompt's file and line."""
    found = []
    for prompt in prompts:
        try:
            found.append(encode_prompt(tokenizer, prompt))
        except YggdrasilError as error:
            place = "" if prompt.place == NOWHERE else f"{prompt.place}: "
            raise YggdrasilError(f"{place}{first_line(error)}") from error
    return found


def encode_chat(tokenizer: "Tokenizer", messages: Messages) -> list[int]:
    """Return the token ids of a chat, rendered by the chat template up to where the assistant's answer begins.

    Raises:
        YggdrasilError: ``messages`` are malformed, the tokenizer has no chat template, or the template rejects them.
    """
    return apply_template(tokenizer, [message.as_dict() for message in as_messages(messages)])


def apply_template(
    tokenizer: "Tokenizer",
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a chat, rendered by the tokenizer's chat template up to where the answer begins.

    Only the template writes control tokens: ``<|im_start|>`` in a message, a tool or a tool result stays text.

    Args:
        turns: messages with ``role`` and ``content``, and further fields such as ``tool_calls``.
        tools: functions that the answer may call, as JSON schemas; templates without support ignore them.
        continues: whether the last message is the beginning of the answer; nothing is then written after this message.
        variables: further variables of the template, such as ``enable_thinking``.

    Raises:
        YggdrasilError: there is no template, or it raises an error for these turns.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise YggdrasilError(NO_TEMPLATE)
    controls = _control_strings(tokenizer, str(tokenizer.chat_template))
    mark = _absent_mark(turns, tools, variables)
    try:
        given: Any = [_marked_turn(turn, controls, mark) for turn in turns]
        functions: Any = [_marked(tool, controls.every, mark) for tool in tools] if tools else None
        named: Any = _marked(dict(variables or {}), controls.every, mark)
        text = tokenizer.apply_chat_template(
            given, tools=functions, add_generation_prompt=not continues, continue_final_message=continues,
            tokenize=False, **named,
        )  # fmt: skip
    except Exception as error:  # a template is a program that may raise anything
        raise YggdrasilError(f"the model's chat template does not take these messages: {first_line(error)}") from error
    check_text("the chat with its tools" if tools else "the chat", text)
    return _encode_marked(tokenizer, str(text), mark)


class _ControlStrings(NamedTuple):
    """Regular expressions for the strings that a tokenizer reads as control tokens; None matches nothing."""

    every: re.Pattern[str] | None
    in_answers: re.Pattern[str] | None  # excludes strings that the template searches for in earlier answers


@lru_cache(maxsize=4)
def _control_strings(tokenizer: "Tokenizer", template: str) -> _ControlStrings:
    """Return patterns for the added tokens that are special or occur in ``template``.

    Other added tokens, such as Gemma's HTML tags, are ordinary text.
    """
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    found = [text for text, is_special in added.items() if len(text) > 1 and (is_special or text in template)]
    # A template such as Qwen3's cuts the reasoning out of earlier answers at "</think>".
    splits = re.findall(r"""split\((['"])(.+?)\1""", template)
    tests = re.findall(r"""(['"])([^'"]+)\1 (?:not )?in """, template)
    looked_for = {text for _, text in (*splits, *tests)}
    return _ControlStrings(_pattern(found), _pattern([text for text in found if text not in looked_for]))


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of ``texts``, the longest first; None if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None


def _absent_mark(*given: object) -> str:
    """Return a string of letters that occurs nowhere in ``given``; template filters leave letters unchanged."""
    written, mark = json.dumps(given, default=str), "qzxcut"
    while mark in written:
        mark += "q"
    return mark


def _marked_turn(turn: Mapping[str, Any], controls: _ControlStrings, mark: str) -> dict[str, Any]:
    pattern = controls.in_answers if turn.get("role") == "assistant" else controls.every
    return {name: value if name == "role" else _marked(value, pattern, mark) for name, value in turn.items()}


def _marked(value: Any, pattern: re.Pattern[str] | None, mark: str) -> Any:
    """Insert ``mark`` after the first character of every match of ``pattern`` in the strings nested in ``value``."""
    if pattern is None:
        return value
    if isinstance(value, Mapping):
        return {_marked(name, pattern, mark): _marked(inner, pattern, mark) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(inner, pattern, mark) for inner in value]
    if not isinstance(value, str):
        return value
    parts, rest = [], value
    while found := pattern.search(rest):
        cut = found.start() + 1  # overlapping control strings are found by the next search
        parts.append(rest[:cut])
        rest = rest[cut:]
    return mark.join([*parts, rest])


def _encode_marked(tokenizer: "Tokenizer", text: str, mark: str) -> list[int]:
    """Return the token ids of a rendered chat. The text is split at ``mark``, so no control token forms across it."""
    first, *others = text.split(mark)
    tokens = tokenizer.encode(first, add_special_tokens=False)
    if others:
        # Some tokenizers prepend a space to a text; after a special token none does.
        anchor = tokenizer.convert_ids_to_tokens(next(iter(tokenizer.added_tokens_decoder)))
        for part in others:
            tokens += tokenizer.encode(f"{anchor}{part}", add_special_tokens=False)[1:]
    return tokens


def as_messages(messages: object) -> tuple[Message, ...]:
    """Check the messages of a chat, given as dictionaries with "role" and "content" or as ``Message``, and return them.

    Raises:
        YggdrasilError: the list is empty, or a message has other fields, an unknown role or no text. If it is no list,
            the error is also a ``TypeError``.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ArgumentTypeError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    return tuple(_message(number, message) for number, message in enumerate(messages, start=1))


def _message(number: int, message: object) -> Message:
    fields = message.as_dict() if isinstance(message, Message) else message
    if not isinstance(fields, Mapping) or set(fields) != {"role", "content"}:
        raise YggdrasilError(f"message {number} must have the fields role and content and no others")
    role, content = fields["role"], fields["content"]
    if role not in get_args(Role):
        raise YggdrasilError(f"message {number} has the role {role!r}; it must be one of {', '.join(get_args(Role))}")
    if not isinstance(content, str):
        raise YggdrasilError(f"message {number} has a content that is no text")
    check_text(f"message {number}", content)
    return Message(role, content)


def read_prompts(path: Path, limit: int | None = None, *, chat: bool = False) -> list[Prompt]:
    """Return the first ``limit`` prompts of a file of JSON lines (None: all).

    With ``chat``, plain prompts become chats of one user message.

    Raises:
        YggdrasilError: the file is missing or empty, ``limit`` is below 1, or a line is not a JSON object with
            ``prompt`` or ``messages``. The message names the file and the line.
    """
    prompts = []
    for found in scan_prompts(path, limit, chat=chat):
        if isinstance(found, BadLine):
            raise YggdrasilError(found.reason)
        prompts.append(found)
    return prompts


def scan_prompts(path: Path, limit: int | None = None, *, chat: bool = False) -> Iterator[Prompt | BadLine]:
    """Yield the prompts of the first ``limit`` lines of a file in order, and a ``BadLine`` for each invalid line.

    If ``limit`` is None, all lines are read. Blank lines are skipped and not counted. With ``chat``, plain prompts
    become chats of one user message.

    Raises:
        YggdrasilError: the file cannot be read or is empty, or ``limit`` is below 1.
    """
    if limit is not None and limit < 1:
        raise YggdrasilError(f"--limit is {limit}; read at least 1 prompt")
    try:
        # utf-8-sig drops a byte-order mark; splitlines would also split at U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise YggdrasilError(
            f"the prompt file {path} cannot be read ({error}); give JSON lines with a prompt field"
        ) from error
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise YggdrasilError(f"{path} holds no prompts; give JSON lines with a prompt field")
    for number, line in filled[:limit]:
        place = Place(str(path), number)
        try:
            found = replace(_prompt(json.loads(line), number), place=place)
        except (YggdrasilError, ValueError, RecursionError) as error:
            yield BadLine(str(number), f"{place} {_reason(error)}", place)
        else:
            yield found.as_chat() if chat else found


def _prompt(record: Any, number: int) -> Prompt:
    """Return the prompt of a parsed line. Raises YggdrasilError with a predicate: callers prepend file and line."""
    record = record if isinstance(record, dict) else {}
    if ("prompt" in record) and ("messages" in record):
        raise YggdrasilError("has both prompt and messages; give one of them")
    category = record.get("category")
    identity = str(record.get("id", number)), None if category is None else str(category)
    for name, value in zip(("its id", "its category"), identity, strict=True):
        _check_field(name, value or "")
    if "messages" in record:
        try:
            messages = as_messages(record["messages"])
        except YggdrasilError as error:
            raise YggdrasilError(f"has messages that are no chat: {error}") from error
        return Prompt(identity[0], messages[-1].content, identity[1], messages)
    if not isinstance(record.get("prompt"), str):
        raise YggdrasilError("has no text in a field named prompt, and no list in one named messages")
    _check_field("the prompt", record["prompt"])
    return Prompt(identity[0], record["prompt"], identity[1])


def _check_field(name: str, text: str) -> None:
    try:
        check_text(name, text)
    except YggdrasilError as error:
        raise YggdrasilError(f"cannot be read: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, YggdrasilError):
        return str(error)
    if isinstance(error, RecursionError):
        return "is nested too deeply; give one object with a prompt field a line"
    said = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error).partition(";")[0]
    return f"is not JSON ({said}); give one object a line"


def spread_over(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most ``count`` of the items in order, evenly spaced, the first included.

    Prompt files are sorted by category, so the items are of as many categories as possible.
    """
    taken = min(count, len(items))
    return [items[number * len(items) // taken] for number in range(taken)]


def check_ids(prompts: Sequence[Prompt]) -> None:
    """Raise YggdrasilError if two prompts have the same id."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise YggdrasilError(f"two prompts have the id {prompt.id}; ids tell samples apart, so give each its own")
        seen.add(prompt.id)
