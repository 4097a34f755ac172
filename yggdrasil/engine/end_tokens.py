"""Finds the end tokens of a model: the tokens after which its text ends."""

from pathlib import Path
from typing import Any

from yggdrasil.artifacts import parse_json
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.errors import YggdrasilError, one_line

_GENERATION = "generation_config.json"
_ANSWER = "an answer"  # placeholder of an answer in a rendered template


def end_tokens(source: str, own: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of all end tokens of the model in the checkpoint folder ``source``.

    They are the eos_token_id of generation_config.json (which may be missing), of the tokenizer and of config.json, and
    the special token that the chat template writes after an answer.

    Args:
        own: the eos_token_id of config.json: a token id, a list of ids, or None.

    Raises:
        YggdrasilError: generation_config.json is damaged, or an end token is not an integer.
    """
    named = {
        _GENERATION: _generation_ends(source),
        "config.json": own,
        "its tokenizer": tokenizer.eos_token_id,
    }
    found: set[int] = set()
    for place, tokens in named.items():
        listed = tokens if isinstance(tokens, list | tuple) else [] if tokens is None else [tokens]
        if not all(type(token) is int for token in listed):
            raise YggdrasilError(f"{source}: the eos_token_id of {place} is {tokens!r:.60}, no token or list of tokens")
        found.update(listed)
    return frozenset(found) | template_end_tokens(tokenizer)


def _generation_ends(source: str) -> Any:
    """Return the eos_token_id of generation_config.json; None if there is none."""
    try:
        return parse_json(Path(source, _GENERATION).read_bytes()).get("eos_token_id")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise YggdrasilError(f"{source}: {_GENERATION} could not be read: {one_line(error)}") from error


def template_end_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the id of the token that ends an answer in the tokenizer's chat template, such as ``<|im_end|>``.

    The set is empty if there is no template, if rendering a chat fails, or if the template writes no special token
    after an answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        return frozenset()
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001  (a template may raise anything; chats then fail later)
        return frozenset()
    after = text.rpartition(_ANSWER)[2].lstrip()
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Longest first, because one name may be a prefix of another.
    return frozenset([number for name, number in sorted(added.items(), reverse=True) if after.startswith(name)][:1])
