"""Run llama.cpp's own converter, with a vocabulary that it can always write in place of the one it would recognise.

    python scripts/llama_cpp_convert.py LLAMA_CPP_SOURCE numbers|words [arguments of convert_hf_to_gguf.py]

Prompts and continuations are exchanged as token ids, so token texts need not matter. With ``numbers`` there is no
end-of-text token, so no continuation ends early, and a tokenizer that llama.cpp does not know is no obstacle. ``words``
is the checkpoint's own byte-level vocabulary: a file that other readers of GGUF can load too.
"""

import json
import sys
from pathlib import Path
from typing import Any

source, vocabulary = Path(sys.argv.pop(1)), sys.argv.pop(1)
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


def set_own_vocabulary(self: Any) -> None:
    """The tokens and merges of tokenizer.json, in GPT-2's way; places without a token are unused."""
    tokenizer = json.loads((self.dir_model / "tokenizer.json").read_text(encoding="utf-8"))
    if tokenizer["model"]["type"] != "BPE":
        raise ValueError(f"{self.dir_model.name} has no byte-level vocabulary")
    size = self.hparams["vocab_size"]
    texts, kinds = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    for text, place in tokenizer["model"]["vocab"].items():
        texts[place], kinds[place] = text, gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list(texts)
    self.gguf_writer.add_token_types(kinds)
    gguf.SpecialVocab(self.dir_model, load_merges=True).add_to_gguf(self.gguf_writer)


def prepare_with_vocabulary(self: Any, *arguments: Any, **options: Any) -> None:
    """As the original, whichever vocabulary the architecture would set."""
    chosen = {"numbers": set_numbered_vocabulary, "words": set_own_vocabulary}[vocabulary]
    self.set_vocab = chosen.__get__(self)
    prepare_metadata(self, *arguments, **options)


TextModel.prepare_metadata = prepare_with_vocabulary
convert_hf_to_gguf.main()
