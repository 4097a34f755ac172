"""Run llama.cpp's own converter, with a vocabulary of numbered tokens in place of the checkpoint's.

    python scripts/llama_cpp_convert.py LLAMA_CPP_SOURCE [arguments of convert_hf_to_gguf.py]

Prompts and continuations are exchanged as token ids, so token texts do not matter, and without an end-of-text token no
continuation ends early. A tokenizer that llama.cpp does not know is then no obstacle either.
"""

import sys
from pathlib import Path
from typing import Any

source = Path(sys.argv.pop(1))
sys.path[:0] = [str(source), str(source / "gguf-py")]

import convert_hf_to_gguf  # noqa: E402
import gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402

prepare_metadata = TextModel.prepare_metadata


def set_numbered_vocabulary(self: Any) -> None:
    """Token i is the text "<i>"; of all tokenizers this one has no special tokens, but it must know a line break."""
    size = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("rwkv")
    self.gguf_writer.add_token_list(["\\n", *(f"<{i}>" for i in range(1, size))])
    self.gguf_writer.add_token_types([gguf.TokenType.NORMAL] * size)


def prepare_with_numbers(self: Any, *arguments: Any, **options: Any) -> None:
    """As the original, whichever vocabulary the architecture would set."""
    self.set_vocab = set_numbered_vocabulary.__get__(self)
    prepare_metadata(self, *arguments, **options)


TextModel.prepare_metadata = prepare_with_numbers
convert_hf_to_gguf.main()
