"""A tokenizer on the ``tokenizers`` library and Jinja alone: importing transformers takes longer than loading a model.

``kept_tokenizer`` writes the files of this tokenizer and checks them against transformers' tokenizer.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import tokenizers

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

_MOST_VALUES = 10_000_000  # characters, items or bits that one operation of a template may make
_MARK = "CONTINUE_FINAL_MESSAGE_TAG"  # after the text that is continued
_ENCODING = ("padding", "truncation", "max_length", "return_tensors", "return_dict")  # options of the encoding
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates read the first


class Tokenizer:
    """A tokenizer with the methods of transformers' tokenizers that Yggdrasil calls.

    Other attributes without a leading underscore are those of ``whole``.

    Args:
        backend: the tokenizer's vocabulary and rules.
        facts: ``chat_template`` (text or None), ``special_tokens`` (text by name), ``eos_token_id``, ``bos_token_id``.
        load: opens the same tokenizer with transformers.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, facts: Mapping[str, Any], load: Callable[[], "PreTrainedTokenizerBase"]
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template: str | None = facts["chat_template"]
        self.special_tokens_map: dict[str, Any] = dict(facts["special_tokens"])
        self.eos_token_id: int | None = facts["eos_token_id"]
        self.bos_token_id: int | None = facts["bos_token_id"]
        self._load = load

    @cached_property
    def whole(self) -> "PreTrainedTokenizerBase":
        """Return the same tokenizer as a transformers object, opened on first access."""
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call transformers' tokenizer ``whole`` with the same arguments, and return its result."""
        return self.whole(*arguments, **options)

    def __len__(self) -> int:
        """Return the number of tokens in the vocabulary, added tokens included."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Return the added tokens as ``tokenizers.AddedToken``, keyed by token id."""
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; ``add_special_tokens`` adds tokens such as the beginning of text."""
        (encoded,) = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the token ids ``tokens``; with ``skip_special_tokens``, without special tokens."""
        return str(self.backend_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by their text, added tokens included."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, tokens: int | Sequence[int]) -> Any:
        """Return the vocabulary's string for one id, or a list of strings for several; None for an unknown id."""
        if isinstance(tokens, int):
            return self.backend_tokenizer.id_to_token(tokens)
        return [self.backend_tokenizer.id_to_token(int(token)) for token in tokens]

    def apply_chat_template(self, turns: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Render a chat with the tokenizer's template in a sandbox, as ``render_chat`` does.

        With ``tokenize=False`` the result is the text (str), otherwise transformers' encoding of the text. ``turns``
        are messages with ``role`` and ``content``; ``options`` are those of transformers' method, and template
        variables.

        Raises:
            ValueError: there is no template, or no text to continue.
            Exception: any exception of the template.
        """
        return render_chat(self, turns, **options)


def render_chat(tokenizer: Any, turns: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Render a chat with the tokenizer's template in a sandbox with limits, which transformers lacks.

    Args:
        turns: messages with ``role`` and ``content``, and further fields that the template reads.
        options: options of transformers' ``apply_chat_template``, and variables of the template.

    Returns:
        The text (str) if ``tokenize`` is False. Otherwise (the default) the result of ``tokenizer`` for this text.

    Raises:
        ValueError: there is no template, or no text to continue.
        Exception: any exception of the template.
    """
    wanted = {"documents": None, "tools": None, "add_generation_prompt": False} | options
    template = wanted.pop("chat_template", None) or tokenizer.chat_template
    tokenizes, continues = wanted.pop("tokenize", True), wanted.pop("continue_final_message", False)
    encoding = {name: wanted.pop(name) for name in _ENCODING if name in wanted}
    if isinstance(template, dict):
        template = template.get("tool_use" if wanted["tools"] else "default", template.get("default"))
    if not template:
        raise ValueError("the tokenizer has no chat template")
    messages = [_message(turn) for turn in turns]
    if continues:
        if "content" not in template:
            raise ValueError("the chat template does not read the content of messages")
        messages[-1] |= {"content": _marked(messages[-1].get("content"))}
    text = _compiled(template).render(**{**tokenizer.special_tokens_map, **wanted, "messages": messages})
    if continues:
        text, mark, rest = text.rpartition(_MARK)
        if not mark:
            raise ValueError("the chat template leaves out the end of the last message, which cannot be continued")
        text = text if rest.startswith(" ") else text.rstrip()  # the template strips the texts of messages
    return tokenizer(text, add_special_tokens=False, **encoding) if tokenizes else text


def _marked(content: Any) -> Any:
    """Return a message's content with ``_MARK`` after its last text. Raises ValueError without a text."""
    if isinstance(content, str):
        return f"{content}{_MARK} "
    parts = [dict(part) for part in content or ()]
    texts = [part for part in parts if "text" in part]
    if not texts:
        raise ValueError("the last message has no text to continue")
    texts[-1]["text"] += f"{_MARK} "
    return parts


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``turn`` without fields that are None, with its reasoning under every name that templates read."""
    given = {name: value for name, value in turn.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def try_template(tokenizer: Any) -> None:
    """Render short chats of all forms with the tokenizer's template, to see whether it uses too much time or memory.

    The forms differ in system message, tools, a tool's result and the prompt of a new answer. Call this function in a
    child process with limits of time and memory: an endless template never returns. Errors of the template are ignored.

    Raises:
        MemoryError: the memory limit of this process is reached.
    """
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}
    system, user, answer = ({"role": role, "content": "a"} for role in ("system", "user", "assistant"))
    answered = {"role": "tool", "content": "c", "tool_call_id": "abcdefghi"}
    called: list[Mapping[str, Any]] = [{**answer, "tool_calls": [call]}, answered]
    chats: list[list[Mapping[str, Any]]] = [[user], [user, answer], [system, user, answer, user], [user, *called]]
    for chat in chats:
        for tools in (None, [{"type": "function", "function": function}]):
            for begins in (True, False):
                try:
                    render_chat(tokenizer, chat, tools=tools, add_generation_prompt=begins, tokenize=False)
                except MemoryError:
                    raise
                except Exception:  # noqa: BLE001  (a template is a program that may raise anything)
                    pass


@lru_cache(maxsize=8)
def _compiled(template: str) -> "Template":
    """Compile ``template`` in Jinja's sandbox, with the functions and filters that transformers provides."""
    import jinja2
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import loopcontrols
    from jinja2.nodes import Impossible
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    class Unfolded(CodeGenerator):
        """Jinja's compiler without constant folding, which would compute a template's constants without a limit."""

        def _output_child_to_const(self, *_: Any) -> str:
            raise Impossible

        def visit_EvalContextModifier(self, *_: Any) -> None:
            raise jinja2.TemplateError("autoescape is not supported")

    class Bounded(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, which limits ``range``, with a limit for products and powers."""

        code_generator_class = Unfolded
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size_of(operator, left, right) > _MOST_VALUES:
                raise jinja2.TemplateError(f"the result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_generation_block(), loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": fail, "strftime_now": lambda layout: datetime.now().astimezone().strftime(layout),
    }  # fmt: skip
    return environment.from_string(template)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Return the length of a product of a sequence and a number, or the bits of a power of integers; otherwise 0."""
    if operator == "**":
        return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    times, values = (left, right) if isinstance(left, int) else (right, left)
    return times * len(values) if isinstance(times, int) and isinstance(values, str | list | tuple) else 0


def _generation_block() -> Any:
    """Return a Jinja extension that parses ``{% generation %}`` blocks, which mark answers for training."""
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Parser) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
