"""Constrained decoding with llguidance: masks of the allowed next tokens as a function of the generated path.

To query a path, the matcher rolls back to the prefix shared with the previous path, so queries along a tree are cheap
and rejected tokens have no effect.
"""

import json
from collections import deque
from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.acceptance.sampling import Constraint
from yggdrasil.arguments import check_package
from yggdrasil.artifacts.fork import ends_within
from yggdrasil.checkpoints.token_bytes import TokenBytes
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.errors import YggdrasilError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

# White space allowed in JSON: one space, or a line break with indentation. With unlimited white space a model may never
# stop; without any, its output gets worse (SmolLM2-135M then answers `[]` to a request for a list). A schema overrides
# this with llguidance's key "x-guidance".
_SPACING: "JsonCompileOptions" = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n {0,16})"}


# Limits for compiling one constraint. 8,000 alternatives take 0.1 s and 10 MB; some schemas never end.
_CPU_SECONDS, _MEGABYTES = 5, 1024
_NUM_CHECKED = 64  # last checked constraints, which are not checked again


class Grammar:
    """A compiled constraint of one request. Paths are generated tokens, without the prompt."""

    def __init__(self, matcher: "LLMatcher", eos: Collection[int]) -> None:
        self._matcher = matcher
        self._eos = sorted(eos)
        self._path: list[int] = []  # tokens the matcher has consumed, without end tokens

    def allows(self, path: Sequence[int]) -> bool:
        """Return whether some text that matches the constraint begins with the generated tokens ``path``.

        An end-of-text token is allowed only as the last of ``path``, after a text that matches as a whole.
        """
        wanted = list(path)
        ends = bool(wanted) and wanted[-1] in self._eos
        if not self._go_to(wanted[:-1] if ends else wanted):
            return False
        return not ends or self._matcher.is_accepting()

    def mask(self, path: Sequence[int], vocab_size: int) -> Tensor:
        """Return which tokens may follow the generated tokens ``path``, [vocab_size] bool.

        All entries are False if ``path`` ends with an end-of-text token or violates the constraint.
        """
        unpacked = np.unpackbits(self.bits(path, vocab_size), count=vocab_size, bitorder="little")
        return torch.from_numpy(unpacked.astype(np.bool_))

    def bits(self, path: Sequence[int], vocab_size: int) -> npt.NDArray[np.uint8]:
        """Return which tokens may follow the generated tokens ``path``, one bit each: [ceil(vocab_size / 8)] uint8.

        Bit t % 8 (0 is the lowest) of byte t // 8 is set if token t is allowed. No bit is set if ``path`` ends with an
        end-of-text token or violates the constraint.

        Raises:
            YggdrasilError: llguidance fails on this path.
        """
        allowed = np.zeros(-(-vocab_size // 8), dtype=np.uint8)
        if (path and path[-1] in self._eos) or not self._go_to(list(path)):
            return allowed
        self._check()
        if self._matcher.is_stopped():  # the text is complete and nothing can be added to it
            for token in self._eos if self._matcher.is_accepting() else ():
                allowed[token >> 3] |= 1 << (token & 7)
            return allowed
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return packed

    def tree_bits(
        self, text: Sequence[int], layout: Sequence[Sequence[int]], vocab_size: int
    ) -> list[npt.NDArray[np.uint8]]:
        """Return for each row of a tree pass which tokens may follow it, as ``bits`` does.

        No bit is set for padding and for rows whose path violates the constraint.

        Args:
            text: generated tokens up to and including the root, which is row 0.
            layout: four columns with one entry per row: node, token, parent's row, and 1 if the row is no padding.
        """
        _, tokens, parents, exist = layout
        found = [self.bits(text, vocab_size)]
        paths = [list(text)]
        for row in range(1, len(tokens)):
            token, above = tokens[row], found[parents[row]]
            paths.append([*paths[parents[row]], token])
            is_allowed = exist[row] and above[token >> 3] >> (token & 7) & 1
            found.append(self.bits(paths[row], vocab_size) if is_allowed else np.zeros_like(above))
        return found

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that follow the generated tokens ``path`` in every text that matches the constraint.

        The list is empty if there is a choice, the text is complete, or ``path`` violates the constraint.
        """
        if not self._go_to(list(path)) or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())

    def _check(self) -> None:
        """Raise YggdrasilError if the matcher is in error; it would otherwise only report that it has stopped."""
        if self._matcher.is_error():
            said = one_line(self._matcher.get_error())
            if "NoExtensionBias" in said:  # llguidance's name for this error
                said = "no token may come next, so no text that begins like this matches it"
            raise YggdrasilError(f"the constraint could not be followed: {said}")

    def _go_to(self, wanted: list[int]) -> bool:
        """Move the matcher to the path ``wanted``; return False, and stop before it, at a token that is not allowed."""
        shared = _shared_length(self._path, wanted)
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        self._path = wanted[:shared]
        # One token at a time: after a disallowed token the matcher is in error and cannot roll back.
        for token in wanted[shared:]:
            is_possible = not self._matcher.is_stopped() and token not in self._eos
            if not is_possible or self._matcher.validate_tokens([token]) != 1:
                self._check()
                return False
            self._matcher.consume_token(token)
            self._path.append(token)
        return True


class GrammarCompiler:
    """Compiler of constraints for one tokenizer, which the constructor converts to llguidance's format.

    The constructor raises YggdrasilError if llguidance is not installed or ``eos`` (ids of end tokens) is empty.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Collection[int]) -> None:
        check_package("llguidance", "a constraint", "structured")
        if not eos:
            raise YggdrasilError("a constraint needs an end-of-text token, which this model does not name")
        from llguidance import LLTokenizer, TokenizerWrapper

        self._lock, self._checked = Lock(), deque[Constraint](maxlen=_NUM_CHECKED)
        self._eos = sorted(eos)
        vocabulary = _Vocabulary(tokenizer, vocab_size, self._eos[0])
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos)
        vocabulary.tokens.clear()  # llguidance has copied them

    def check(self, constraint: Constraint) -> None:
        """Compile ``constraint`` on trial, with limits of processor time and memory; any thread may call it.

        Raises:
            YggdrasilError: compiling takes more than 5 s of processor time or 1,024 MB. Other faults are reported by
                ``compile``.
        """
        with self._lock:
            if constraint in self._checked:
                return
            if not ends_within(lambda: self._matcher(constraint), _CPU_SECONDS, _MEGABYTES):
                raise YggdrasilError(
                    f"the {constraint.name} is too complex: compiling it takes more than {_CPU_SECONDS} s or "
                    f"{_MEGABYTES} MB; give fewer alternatives that overlap"
                )
            self._checked.append(constraint)

    def compile(self, constraint: Constraint) -> Grammar:
        """Return the compiled constraint for one request, checked against the limits first.

        Raises:
            YggdrasilError: the schema, expression or grammar is invalid or too complex.
        """
        self.check(constraint)
        return Grammar(self._matcher(constraint), self._eos)

    def _matcher(self, constraint: Constraint) -> "LLMatcher":
        """Return a matcher that has computed its first mask, where complex constraints take most time."""
        from llguidance import LLMatcher

        try:
            grammar = _to_llguidance(constraint)
        except (ValueError, RecursionError) as error:
            raise _not_valid(constraint, error) from error
        fault = LLMatcher.validate_grammar(grammar, self._tokenizer)
        if fault:
            raise _not_valid(constraint, fault)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _not_valid(constraint, matcher.get_error())
        matcher.compute_bitmask()
        return matcher


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the added tokens that a grammar must reference by id and not by their text: text -> token id.

    These are special tokens, tokens that the chat template writes, such as Qwen's ``<tool_call>``, and tokens that the
    base vocabulary lacks.

    Raises:
        YggdrasilError: the tokenizer has no tokenizer.json.
    """
    model, template = _backend(tokenizer).model, str(getattr(tokenizer, "chat_template", None))
    return {
        str(token): number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or str(token) in template or model.token_to_id(str(token)) is None
    }


def _backend(tokenizer: Tokenizer) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise YggdrasilError("constraints need a fast tokenizer (tokenizer.json), which this model does not have")
    return backend


class _Vocabulary:
    """The first ``size`` tokens of a tokenizer, as llguidance reads them. Text never matches a control token."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos: int) -> None:
        self._backend = _backend(tokenizer)
        bytes_of = TokenBytes(tokenizer, self._backend)
        self.eos_token_id, self.bos_token_id = eos, None
        self.special_token_ids = sorted(control_tokens(tokenizer).values())
        # No text has the byte 255, with which llguidance marks special tokens.
        self.tokens = [data if data[:1] != b"\xff" else b"" for data in map(bytes_of, range(size))]

    def __call__(self, text: str) -> list[int]:
        """Tokenise ``text`` without added tokens, and return the token ids.

        With added tokens, llguidance would force a control token where a grammar wants the same text, and then refuse
        it.
        """
        before, split = self._backend.normalizer, self._backend.pre_tokenizer
        text = text if before is None else before.normalize_str(text)
        words = [text] if split is None else [word for word, _ in split.pre_tokenize_str(text)]
        return [token.id for word in words for token in self._backend.model.tokenize(word)]


def _not_valid(constraint: Constraint, reason: object) -> YggdrasilError:
    return YggdrasilError(f"the {constraint.name} is not valid: {one_line(reason)}")


def _to_llguidance(constraint: Constraint) -> str:
    """Translate ``constraint`` to llguidance's grammar format, which does not find all of its faults.

    Raises:
        ValueError: it is no JSON schema, a regex that ends with one backslash, or no GBNF grammar.
        RecursionError: its JSON is nested too deeply.
    """
    from llguidance import LLMatcher, grammar_from

    if constraint.kind == "json_schema":
        schema: Any = json.loads(constraint.text)
        if schema is False:
            raise ValueError("false allows nothing")
        if schema is not True and not isinstance(schema, dict):
            raise ValueError("a schema is a JSON object, or true")
        has_own = isinstance(schema, dict) and "x-guidance" in schema
        return LLMatcher.grammar_from_json_schema(
            json.dumps({} if schema is True else schema), None if has_own else _SPACING
        )
    if constraint.kind == "regex":
        if (len(constraint.text) - len(constraint.text.rstrip("\\"))) % 2:
            raise ValueError("it ends with a backslash, which escapes nothing")  # llguidance drops it
        return LLMatcher.grammar_from_regex(constraint.text)
    return grammar_from("grammar", constraint.text)  # detects whether it is Lark or GBNF


def _shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    if left == right[: len(left)]:
        return len(left)
    return next(i for i, token in enumerate(left) if i == len(right) or token != right[i])
