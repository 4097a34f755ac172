"""GGUF files that hold no language model say what they hold."""

import numpy as np
import pytest
from gguf_files import finish, new_writer

from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.checkpoints.gguf.config import read_config
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli.open_decoder import check_source
from yggdrasil.errors import YggdrasilError


def header(path, architecture, facts, tensors=("token_embd.weight",)):
    writer = new_writer(path, architecture, facts)
    for name in tensors:
        writer.add_tensor(name, np.zeros((4, 4), np.float32))
    finish(writer)
    return read_gguf_header(path)


@pytest.mark.parametrize(
    ("architecture", "facts", "tensors", "said"),
    [
        ("llama", {"general.type": "adapter"}, ["blk.0.attn_q.weight.lora_a"], r"an adapter \(LoRA\) .* merge it"),
        ("qwen2", {}, ["blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"], "adapters are not served"),
        ("clip", {"general.type": "mmproj"}, ["v.patch_embd.weight"], r"encoder \(mmproj\) of a multimodal model"),
        ("clip", {}, ["v.patch_embd.weight"], r"\(mmproj\)"),
        ("bert", {}, ["token_embd.weight"], r"an embedding model \(bert\): it gives vectors and no text"),
        ("nomic-bert", {"nomic-bert.pooling_type": 1}, ["token_embd.weight"], "an embedding model"),
        ("qwen3", {"qwen3.pooling_type": 3}, ["token_embd.weight"], r"an embedding model \(qwen3\)"),
        ("llama", {"llama.attention.causal": False}, ["token_embd.weight"], "an embedding model"),
        ("bert", {"bert.pooling_type": 4}, ["token_embd.weight"], r"a reranker \(bert\): it gives scores and no text"),
        ("controlvector", {}, ["direction.1"], "is a control vector"),
        ("t5", {}, ["enc.blk.0.attn_q.weight"], "an encoder-decoder model"),
        ("whisper", {}, ["encoder.weight"], "a speech recognition model"),
        ("flux", {}, ["img_in.weight"], "an image generation model"),
        ("llama", {"general.type": "imatrix"}, ["blk.0.in_sum2"], r"statistics for quantising a model \(imatrix\)"),
        ("llama", {}, [], "a vocabulary and no weights"),
    ],
)
def test_what_a_file_holds_is_said(tmp_path, architecture, facts, tensors, said):
    with pytest.raises(YggdrasilError, match=said) as caught:
        read_config(header(tmp_path / "file.gguf", architecture, facts, tensors))

    assert "file.gguf" in str(caught.value)
    assert "fetch the file again" not in str(caught.value)
    with pytest.raises(YggdrasilError, match=said):  # and not that it has no chat template
        check_source(str(tmp_path / "file.gguf"), chat=True)


def test_a_file_is_announced_only_once_it_is_known_to_be_a_model(tmp_path, capfd):
    for architecture in ("bert", "unheard-of"):
        path = header(tmp_path / f"{architecture}.gguf", architecture, {}).path
        with pytest.raises(YggdrasilError):
            Source.find(path)
    assert "reading" not in capfd.readouterr().err
