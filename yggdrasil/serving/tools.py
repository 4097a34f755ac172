"""Tool calls: their format, found by rendering a sample call with the model's chat template, and their parsing."""

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from yggdrasil.acceptance.grammar import control_tokens
from yggdrasil.acceptance.sampling import Constraint
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.serving.replies import FunctionCall, ToolCallReply
from yggdrasil.serving.request_fields import Tool

# Placeholders that occur in no chat template.
_NAME, _KEY, _VALUE, _TEXT = "qzx_function", "qzx_key", "qzx_value", "qzx_text"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Parsed(NamedTuple):
    """The text of an answer and its tool calls."""

    content: str
    calls: list[ToolCallReply]


@dataclass(frozen=True)
class ToolFormat:
    """Format of a tool call in an answer's text: ``begin``, a JSON object (within a list if ``is_list``), ``end``."""

    lead: str  # what the template writes before an answer, such as an empty thinking block; the model may omit it
    begin: str
    end: str
    name_key: str  # key of the function's name in the JSON object
    arguments_key: str  # key of the arguments
    is_list: bool
    specials: dict[str, int]  # the tokenizer's special tokens and ids, removed from replies
    controls: dict[str, int]  # added tokens, special or not, which a grammar writes by id

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ToolFormat | None":
        """Return the format of tool calls in the tokenizer's chat template, found by rendering a chat with a call.

        The result is None if the template fails, takes no tools or writes calls in another form than JSON.

        Raises:
            YggdrasilError: the tokenizer has no tokenizer.json.
        """
        function = {"name": _NAME, "description": "d", "parameters": _PARAMETERS}
        tools: list[Any] = [{"type": "function", "function": function}]
        call = {"type": "function", "id": "abcdefghi", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
        question: Any = {"role": "user", "content": "a question"}
        answers: list[Any] = [
            {"role": "assistant", "content": _TEXT}, {"role": "assistant", "content": "", "tool_calls": [call]},
        ]  # fmt: skip
        try:
            before = str(tokenizer.apply_chat_template(
                [question], tools=tools, tokenize=False, add_generation_prompt=True
            ))  # fmt: skip
            said, called = (
                str(tokenizer.apply_chat_template([question, answer], tools=tools, tokenize=False))
                for answer in answers
            )
        except Exception:  # noqa: BLE001  (a template is a program that may raise anything)
            return None
        if _NAME not in before or not called.startswith(before):
            return None
        lead = said[len(before) :].partition(_TEXT)[0] if said.startswith(before) else ""
        specials = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        return cls._read(lead, called[len(before) :], specials, control_tokens(tokenizer))

    @classmethod
    def _read(cls, lead: str, written: str, specials: dict[str, int], controls: dict[str, int]) -> "ToolFormat | None":
        lead = lead if written.startswith(lead) else ""
        for place in (match.start() for match in re.finditer(r"[\[{]", written)):
            try:
                found, end = json.JSONDecoder().raw_decode(written, place)
            except ValueError:
                continue
            is_list = isinstance(found, list)
            entry = found[0] if is_list and found else found
            if not isinstance(entry, dict) or _NAME not in entry.values():
                continue
            keys = {json.dumps(value): key for key, value in entry.items()}
            arguments = keys.get(json.dumps({_KEY: _VALUE}))
            if arguments is None:
                return None
            closing = re.split("|".join(map(re.escape, specials)) or r"\Z", written[end:], maxsplit=1)[0]
            return cls(
                lead, written[len(lead) : place], closing.rstrip() and closing, keys[json.dumps(_NAME)], arguments,
                is_list, specials, controls,
            )  # fmt: skip
        return None

    @cached_property
    def reads_special(self) -> bool:
        """Whether the marker that begins a call consists of special tokens, which detokenisation may leave out.

        If so, answers must be detokenised with ``skip_special_tokens=False``.
        """
        return bool(self.begin.strip()) and not self._shown(self.begin).strip()

    @cached_property
    def _mark(self) -> str:
        """Return the marker that begins a call in a detokenised answer; empty if there is none."""
        return (self.begin if self.reads_special else self._shown(self.begin)).strip()

    @cached_property
    def _lead(self) -> str:
        return self.lead if self.reads_special else self._shown(self.lead)

    def _shown(self, text: str) -> str:
        return "".join(part for part in _split_at(text, self.specials) if part not in self.specials)

    def _visible(self, text: str) -> str:
        """Return a part of a detokenised answer as a reply shows it: without special tokens."""
        return self._shown(text) if self.reads_special else text

    def decided(self, text: str) -> str:
        """Return the beginning of the unfinished answer ``text`` that cannot belong to a tool call and can be streamed.

        Special tokens are removed. The result is "" while the answer may still begin with a tool call.
        """
        return self._visible(text[: self._num_decided(text)])

    def _num_decided(self, text: str) -> int:
        mark, lead = self._mark, self._lead
        if lead.startswith(text):
            return 0
        if not mark:
            return 0 if text.removeprefix(lead).lstrip()[:1] in ("", "{", "[") else len(text)
        if self._may_be_unmarked(text.removeprefix(lead)):
            return 0
        place = text.find(mark)
        if place < 0:
            sizes = range(min(len(mark) - 1, len(text)), 0, -1)
            place = len(text) - next((size for size in sizes if mark.startswith(text[-size:])), 0)
        return 0 if lead and text[:place].rstrip() == lead.rstrip() else place

    def parse(self, text: str, names: Collection[str]) -> Parsed:
        """Split the text of a finished answer into content (without special tokens) and tool calls.

        Without calls, the content is the whole text. With marked calls, the content is the text before the first call,
        and text between or after calls is dropped.

        Args:
            text: the answer, with special tokens if ``reads_special``.
            names: names of the tools. JSON without the marker of a call is a call only if it has one of these names.
        """
        mark, lead = self._mark, self._lead
        if not mark:
            found, end = _json_at(text, len(lead) if text.startswith(lead) else 0)
            entries = found if isinstance(found, list) else [found]
            is_call = bool(entries) and not text[end:].strip() and all(self._is_call(each, names) for each in entries)
            return Parsed("", list(map(self._reply, entries))) if is_call else Parsed(text, [])
        calls: list[ToolCallReply] = []
        content, place = self._visible(text), text.find(mark)
        while place >= 0:
            found, end = _json_at(text, place + len(mark))
            marked = [each for each in (found if isinstance(found, list) else [found]) if self._is_named(each)]
            if marked and not calls:
                before = text[:place].rstrip()
                content = "" if before == lead.rstrip() else self._visible(before).rstrip()
            calls += map(self._reply, marked)
            place = text.find(mark, end)
        if not calls:
            unmarked = _json_blocks(text.removeprefix(lead))
            if unmarked and all(self._is_call(entry, names) for entry in unmarked):
                return Parsed("", list(map(self._reply, unmarked)))
        return Parsed(content, calls)

    def _may_be_unmarked(self, text: str) -> bool:
        """Return whether ``text`` may be the beginning of calls that the model writes without the marker.

        For example, Qwen2.5-Coder writes a fenced block of JSON.
        """
        head, fence = text.lstrip(), "```json"
        if fence.startswith(head):
            return True
        head = re.sub(r"\s+", "", head.removeprefix(fence).removeprefix("```"))
        starts = (f'{{"{self.name_key}":', f'[{{"{self.name_key}":')
        return any(start.startswith(head) or head.startswith(start) for start in starts)

    def _is_named(self, entry: Any) -> bool:
        return isinstance(entry, dict) and isinstance(entry.get(self.name_key), str)

    def _is_call(self, entry: Any, names: Collection[str]) -> bool:
        return self._is_named(entry) and entry[self.name_key] in names and self.arguments_key in entry

    def _reply(self, entry: dict[str, Any]) -> ToolCallReply:
        given = entry.get(self.arguments_key) or {}
        arguments = given if isinstance(given, str) else json.dumps(given)  # some models write JSON text
        function = FunctionCall(name=entry[self.name_key], arguments=arguments)
        return ToolCallReply(id=uuid.uuid4().hex[:9], function=function)  # Mistral's templates require 9 characters

    def constraint(self, tools: Sequence[Tool]) -> Constraint:
        """Return a grammar that permits exactly one call, of one of ``tools``, with arguments that match its schema.

        Nothing else is permitted, except the text with which the chat template begins such an answer.
        """
        definitions: dict[str, Any] = {}
        choices = []
        for number, tool in enumerate(tools):
            address = f"urn:tool:{number}"  # base of the schema's own references
            definitions[str(number)] = {**(tool.function.parameters or {"type": "object"}), "$id": address}
            properties = {self.name_key: {"const": tool.function.name}, self.arguments_key: {"$ref": address}}
            choices.append({
                "type": "object", "properties": properties, "required": list(properties),
                "additionalProperties": False,
            })  # fmt: skip
        schema: dict[str, Any] = {"anyOf": choices}
        if self.is_list:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        schema |= {"$defs": definitions, "x-guidance": _SPACING}
        # The grammar includes the lead, because a model that thinks begins with its (empty) thinking block.
        parts = [*self._literals(self.lead + self.begin), "call", *self._literals(self.end)]
        text = f"start: {' '.join(parts)}\ncall: %json {json.dumps(schema)}\n"
        return Constraint("grammar", text, title="schema of the tools")

    def _literals(self, text: str) -> list[str]:
        """Return the terms of a Lark grammar that match ``text``, added tokens by id."""
        parts = _split_at(text, self.controls)
        return [f"<[{self.controls[part]}]>" if part in self.controls else json.dumps(part) for part in parts]


def _split_at(text: str, tokens: Collection[str]) -> list[str]:
    """Split ``text`` at each of ``tokens``, which are parts of the result; empty parts are omitted."""
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    return [part for part in parts if part]


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value at ``start``, after white space. Return (value, end), or (None, ``start``) if there is none.

    Strings may have unescaped line breaks and tabs, because models write code like that.
    """
    place = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        found, end = json.JSONDecoder(strict=False).raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, start
    return found, end


def _json_blocks(text: str) -> list[Any]:
    """Return the JSON values of a text that consists of JSON alone; an empty list if the text has anything else.

    The values may be in fenced blocks, in a list or consecutive.
    """
    values: list[Any] = []
    place = 0
    while rest := re.sub(r"^(\s|```(json)?(?=\s|$))+", "", text[place:]):
        place = len(text) - len(rest)
        found, end = _json_at(text, place)
        if end == place:
            return []
        values += found if isinstance(found, list) else [found]
        place = end
    return values
