#!/usr/bin/env python3
"""Write a GGUF file with the layer sizes of gpt-oss-20b and random weights, to time passes without the published file.

    scripts/random_gpt_oss.py gpt-oss.gguf --layers 12    # 6.7 GB; the published model has 24 layers
    scripts/compare_steps gpt-oss.gguf --llama-cpp work/llama.cpp --contexts 64 --widths 1

Experts are MXFP4, other matrices Q8_0. The tokenizer has single bytes and unused tokens.
"""

from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import numpy.typing as npt
import typer
from tokenizers import pre_tokenizers

from yggdrasil.cli import run_script

HIDDEN, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2880, 32, 64, 8, 64, 201_088
PROJECTIONS = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
}
Bytes = npt.NDArray[np.uint8]


class Writer:
    """A file in the making, and the random numbers of its weights."""

    def __init__(self, path: Path) -> None:
        self.file = gguf.GGUFWriter(path, "gpt-oss")
        self._random = np.random.default_rng(0)

    def blocks(self, name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0) -> None:
        """Add a matrix, or experts, of random blocks of 32 values whose scale is small."""
        is_q8 = kind == gguf.GGMLQuantizationType.Q8_0
        size = 34 if is_q8 else 17
        found: Bytes = self._random.integers(0, 256, (*shape[:-1], shape[-1] // 32, size), dtype=np.uint8)
        if is_q8:
            found[..., :2] = np.frombuffer(np.float16(0.0003).tobytes(), dtype=np.uint8)
        else:
            found[..., 0] = 119  # 2 to the power of -8
        self.file.add_tensor(name, found.reshape(*shape[:-1], -1), raw_dtype=kind)

    def numbers(self, name: str, *shape: int, mean: float = 0.0) -> None:
        """Add float32 numbers around ``mean``."""
        values = self._random.standard_normal(shape) * 0.02 + mean
        self.file.add_tensor(name, values.astype(np.float32))


def main(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    layers: Annotated[int, typer.Option(min=2, help="Decoder layers.")] = 24,
) -> None:
    """Write the file."""
    writer = Writer(out)
    _add_facts(writer.file, layers)
    writer.blocks("token_embd.weight", VOCABULARY, HIDDEN)
    writer.blocks("output.weight", VOCABULARY, HIDDEN)
    writer.numbers("output_norm.weight", HIDDEN, mean=1.0)
    for layer in range(layers):
        stem = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm"):
            writer.numbers(f"{stem}{name}.weight", HIDDEN, mean=1.0)
        for name, shape in PROJECTIONS.items():
            writer.blocks(f"{stem}{name}.weight", *shape)
            writer.numbers(f"{stem}{name}.bias", shape[0])
        writer.numbers(f"{stem}attn_sinks.weight", HEADS)
        writer.numbers(f"{stem}ffn_gate_inp.weight", EXPERTS, HIDDEN)
        writer.numbers(f"{stem}ffn_gate_inp.bias", EXPERTS)
        for part in ("gate", "up", "down"):
            name = f"{stem}ffn_{part}_exps"
            writer.blocks(f"{name}.weight", EXPERTS, HIDDEN, HIDDEN, kind=gguf.GGMLQuantizationType.MXFP4)
            writer.numbers(f"{name}.bias", EXPERTS, HIDDEN)
    writer.file.write_header_to_file()
    writer.file.write_kv_data_to_file()
    writer.file.write_tensors_to_file(progress=True)
    writer.file.close()


def _add_facts(file: gguf.GGUFWriter, layers: int) -> None:
    file.add_block_count(layers)
    file.add_context_length(131_072)
    file.add_embedding_length(HIDDEN)
    file.add_feed_forward_length(HIDDEN)
    file.add_expert_feed_forward_length(HIDDEN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_key_length(HEAD_DIM)
    file.add_value_length(HEAD_DIM)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_expert_count(EXPERTS)
    file.add_expert_used_count(4)
    file.add_sliding_window(128)
    file.add_rope_freq_base(150_000.0)
    file.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    file.add_rope_scaling_factor(32.0)
    file.add_rope_scaling_orig_ctx_len(4096)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    unused = VOCABULARY - len(words) - 1
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-4o")
    file.add_token_list([*words, *(f"[PAD{number}]" for number in range(unused)), "<|end|>"])
    kinds = gguf.TokenType
    file.add_token_types([*[kinds.NORMAL] * len(words), *[kinds.UNUSED] * unused, kinds.CONTROL])
    file.add_token_merges(["a b"])
    file.add_eos_token_id(VOCABULARY - 1)


if __name__ == "__main__":
    run_script(main, "random_gpt_oss")
