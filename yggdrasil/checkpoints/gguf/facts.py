"""What a GGUF file says beside its weights, in Hugging Face layout: configuration, tokenizer, what ends an answer."""

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.gguf.config import read_config
from yggdrasil.errors import YggdrasilError, first_line

_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What ends a turn in files that do not say so, as llama.cpp finds it too.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def write_facts(header: GgufHeader, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer's files, chat template included.

    Raises:
        YggdrasilError: an architecture or a fact that is not understood, or no tokenizer in the file.
    """
    config = read_config(header)
    config.save_pretrained(folder)
    ends = _end_tokens(header)
    GenerationConfig(eos_token_id=ends or None, bos_token_id=config.bos_token_id).save_pretrained(folder)
    if not header.facts.get("tokenizer.ggml.tokens"):
        raise YggdrasilError(f"{shown(header.path)} holds no tokenizer; give a file that does, or a checkpoint folder")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except Exception as error:
        raise YggdrasilError(f"{shown(header.path)}: the tokenizer could not be read: {first_line(error)}") from error
    tokenizer.save_pretrained(folder)


def _end_tokens(header: GgufHeader) -> list[int]:
    """The tokens that end an answer: those that the file names, and where it names none for a turn, the usual ones."""
    named = {name: header.facts.get(f"tokenizer.ggml.{name}") for name in _END_TOKENS}
    ends = {int(token) for token in named.values() if isinstance(token, int)}
    tokens = header.facts.get("tokenizer.ggml.tokens")
    if named["eot_token_id"] is None and isinstance(tokens, list):
        ends |= {tokens.index(token) for token in _TURN_ENDS if token in tokens}
    return sorted(ends)
