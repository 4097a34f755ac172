"""Converts the metadata of a GGUF file to Hugging Face layout: configuration, tokenizer and end-of-text tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.gguf.config import is_complete, read_config
from yggdrasil.checkpoints.gguf.tokenizer import build_tokenizer
from yggdrasil.checkpoints.kept_tokenizer import write_tokenizer
from yggdrasil.errors import YggdrasilError, first_line, one_line

# GGUF metadata for tokens that end a text, a turn, a message or a source file.
_END_TOKENS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# The texts of such tokens, for files whose metadata lacks them; the same list as llama.cpp's.
_END_SPELLINGS = frozenset((
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "< EOT >", "<|fim_pad|>", "<fim-pad>", "<fim_pad>",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<|file_sep|>", "<turn|>", "<|tool_response>",
))  # fmt: skip
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))  # if both exist, "<|end|>" ends a message but not the answer


def write_config_and_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write a GGUF file's configuration and tokenizer to ``folder`` as the files that transformers reads.

    The files are config.json, generation_config.json and the tokenizer's files, with the chat template if there is one.
    The folder must exist; files in it are overwritten.

    Raises:
        YggdrasilError: the architecture or its metadata is unsupported, or the file has no readable tokenizer.
    """
    config = read_config(header)
    if is_complete(header, config):
        _write_json(folder / "config.json", config)
    else:
        _write_config(header, config, folder)
    ends = {"eos_token_id": _end_tokens(header) or None, "bos_token_id": config["bos_token_id"]}
    _write_json(folder / "generation_config.json", {name: value for name, value in ends.items() if value is not None})
    if not header.facts.get("tokenizer.ggml.tokens"):
        raise YggdrasilError(f"{shown(header.path)} holds no tokenizer; give a file that does, or a checkpoint folder")
    built = build_tokenizer(header)
    if built is not None:
        write_tokenizer(folder, *built)
        return
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except Exception as error:
        raise YggdrasilError(f"{shown(header.path)}: the tokenizer could not be read: {first_line(error)}") from error
    tokenizer.save_pretrained(folder)


def _write_config(header: GgufHeader, facts: Mapping[str, Any], folder: Path) -> None:
    """Write config.json with missing fields filled from the defaults of transformers' class."""
    from transformers import AutoConfig, PretrainedConfig

    try:
        config: PretrainedConfig = AutoConfig.for_model(**facts)
    except Exception as error:
        raise YggdrasilError(f"{shown(header.path)}: the metadata is inconsistent: {one_line(error)}") from error
    config.save_pretrained(folder)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _end_tokens(header: GgufHeader) -> list[int]:
    """Return the ids of the tokens that end an answer, from the metadata and by known texts in the vocabulary.

    Without the tokens found by text, a code model may continue with another document after ``<|endoftext|>`` or
    ``<|file_sep|>``.
    """
    named = (header.facts.get(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS)
    ends = {int(token) for token in named if isinstance(token, int)}
    tokens = header.facts.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        found = {token: number for number, token in enumerate(tokens) if token in _END_SPELLINGS}
        if found.keys() >= _HARMONY_ENDS:
            found.pop("<|end|>", None)
        ends |= set(found.values())
    return sorted(ends)
