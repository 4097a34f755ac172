"""At which tokens a model's text ends."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

_ANSWER = "an answer"  # stands for one in a rendered template


def end_tokens(source: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end that the generation configuration, the model's, the tokenizer or its chat template names."""
    try:
        generation = GenerationConfig.from_pretrained(source, local_files_only=Path(source).exists()).eos_token_id
    except (OSError, ValueError):  # most files that hold all in one have none
        generation = None
    named = (generation, getattr(config.get_text_config(), "eos_token_id", None), tokenizer.eos_token_id)
    return frozenset(token for tokens in named for token in _listed(tokens)) | template_ends(tokenizer)


def template_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
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


def _listed(tokens: Any) -> Iterable[int]:
    if tokens is None:
        return ()
    return (tokens,) if isinstance(tokens, int) else tokens
