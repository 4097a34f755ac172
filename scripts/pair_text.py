"""Text for training a pair, as tokens: a folder of Python and one of prose become a tokenizer and files of tokens.

Documents are split by hash: one in fifty is held out of the tokenizer and of all training.

Dims: B sequences, S tokens of a sequence.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from yggdrasil.artifacts import write_atomic
from yggdrasil.errors import YggdrasilError

END_OF_TEXT = "<|endoftext|>"
PROSE_BLOCK_CHARS = 16_000
HELD_OUT_ONE_IN = 50
console = Console()


def read_documents(code: Path, prose: Path) -> Iterator[tuple[str, str]]:
    """Yield ("code" | "prose", text); a prose file is cut into blocks at blank lines."""
    for path in sorted(code.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 200:
            yield "code", text
    for path in sorted(prose.glob("*.txt")):
        block: list[str] = []
        size = 0
        for paragraph in path.read_text(encoding="utf-8", errors="ignore").split("\n\n"):
            block.append(paragraph)
            size += len(paragraph)
            if size >= PROSE_BLOCK_CHARS:
                yield "prose", "\n\n".join(block)
                block, size = [], 0
        if block:
            yield "prose", "\n\n".join(block)


def is_held_out(text: str) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str], vocab_size: int, max_positions: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every string can be encoded, nothing is normalised away."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def prepare(
    code: Path,
    prose: Path,
    work: Path,
    *,
    vocab_size: int,
    max_positions: int,
    least: Mapping[str, int],
    start_from: Path | None = None,
) -> PreTrainedTokenizerFast:
    """Write the tokenizer (that of the pair ``start_from`` if given) and a uint16 token file for each of
    {code, prose} x {train, held_out}.

    Raises:
        YggdrasilError: there are fewer tokens of one than ``least`` says, of which windows are drawn.
    """
    tokenizer_dir = work / "tokenizer"
    if (work / "prepared.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    documents = list(read_documents(code, prose))
    folders = {"code": code, "prose": prose}
    for kind, folder in folders.items():
        if len({is_held_out(text) for of, text in documents if of == kind}) < 2:
            raise YggdrasilError(
                f"too little {kind} in {folder}: one document in {HELD_OUT_ONE_IN} is held out and the others are "
                "learned from, and there must be both (code is *.py at any depth, prose is *.txt)"
            )
    training = [text for _, text in documents if not is_held_out(text)]
    console.print(f"{len(documents)} documents, {len(documents) - len(training)} held out; preparing tokens")
    if start_from is None:
        tokenizer = train_tokenizer(training, vocab_size, max_positions)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(start_from / "target")
    tokenizer.save_pretrained(tokenizer_dir)
    streams: dict[str, list[int]] = {}
    for kind, text in documents:
        stream = streams.setdefault(f"{kind}.{'held_out' if is_held_out(text) else 'train'}", [])
        stream.extend(tokenizer.backend_tokenizer.encode(text).ids)
        stream.append(tokenizer.eos_token_id)
    for name, tokens in streams.items():
        kind, part = name.split(".")
        if len(tokens) < least[part]:
            use = "held out" if part == "held_out" else "learned from"
            raise YggdrasilError(
                f"too little {kind} in {folders[kind]}: {len(tokens)} tokens are {use}, and {least[part]} at least are "
                "needed; give more text"
            )
    counts = {}
    for name, tokens in streams.items():
        np.save(work / f"{name}.npy", np.array(tokens, dtype=np.uint16))
        counts[name] = len(tokens)
    write_atomic(work / "prepared.json", json.dumps(counts, indent=1).encode())
    console.print(counts)
    return tokenizer


class TokenSampler:
    """Draws random windows from the training streams, of prose with this share."""

    def __init__(self, work: Path, prose_share: float, seed: int) -> None:
        self.streams = [np.load(work / f"{kind}.train.npy", mmap_mode="r") for kind in ("prose", "code")]
        self.prose_share = prose_share
        self.rng = np.random.default_rng(seed)

    def batch(self, num_sequences: int, length: int) -> Tensor:  # [B, S]
        rows = []
        for _ in range(num_sequences):
            stream = self.streams[0 if self.rng.random() < self.prose_share else 1]
            start = int(self.rng.integers(0, len(stream) - length))
            rows.append(torch.from_numpy(stream[start : start + length].astype(np.int64)))
        return torch.stack(rows)
