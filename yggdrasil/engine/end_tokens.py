"""At which tokens a model's text ends."""

from pathlib import Path
from typing import Any

from yggdrasil.artifacts import parse_json
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.errors import YggdrasilError, one_line

_GENERATION = "generation_config.json"
_ANSWER = "an answer"  # stands for one in a rendered template


def end_tokens(source: str, own: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the end tokens of the checkpoint folder ``source``: of its generation_config.json, its tokenizer, its chat
    template, and ``own``, the eos_token_id of its config.json (a token, a list of tokens or None).

    Raises:
        YggdrasilError: one of them is damaged, or names what is no token.
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
    return frozenset(found) | template_ends(tokenizer)


def _generation_ends(source: str) -> Any:
    """The end tokens of the generation configuration; None where there is none."""
    try:
        return parse_json(Path(source, _GENERATION).read_bytes()).get("eos_token_id")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise YggdrasilError(f"{source}: {_GENERATION} could not be read: {one_line(error)}") from error


def template_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """The token that closes an answer in the chat template, such as ``<|im_end|>``; none where none does."""
    if not getattr(tokenizer, "chat_template", None):
        return frozenset()
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001  (a template is a program: it raises what it likes; chats are refused later)
        return frozenset()
    behind = text.rpartition(_ANSWER)[2].lstrip()
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    # The longest first: one name may begin with another's.
    return frozenset([number for name, number in sorted(added.items(), reverse=True) if behind.startswith(name)][:1])
