"""Gemma 4 in GGUF files, as llama.cpp's converter writes them."""

import json

import gguf
import pytest
import torch
from gguf_files import add_tokenizer, finish, new_writer
from tiny_pair import VOCAB_SIZE
from transformers import AutoModelForCausalLM, Gemma4TextConfig, GemmaTokenizer

from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.selfcheck import check_tree_attention

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
ONE_KEY = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
KINDS = {
    "dense": {**ONE_KEY, "final_logit_softcapping": 30.0},
    "per_layer": {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "experts": {
        **ONE_KEY, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def random_model(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**(SIZES | KINDS[kind])), dtype=torch.float32).eval()
    for tensor in model.state_dict().values():
        tensor.mul_(3) if tensor.ndim >= 2 else tensor.add_(torch.randn_like(tensor) / 4)
    return model


def facts_of(config):
    near = [kind == "sliding_attention" for kind in config.layer_types]
    first = config.num_hidden_layers - config.num_kv_shared_layers
    sliding, far = config.per_layer_config[0], config.per_layer_config[1]
    inner = [config.intermediate_size * (1 + (config.use_double_wide_mlp and i >= first)) for i in range(len(near))]
    facts = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size, "feed_forward_length": inner,
        "context_length": config.max_position_embeddings, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [
            sliding.num_key_value_heads if each else far.num_key_value_heads for each in near
        ],
        "attention.key_length": far.head_dim, "attention.key_length_swa": sliding.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": near, "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input, "rope.freq_base": 1e6,
        "rope.dimension_count": far.head_dim,
    }  # fmt: skip
    if config.final_logit_softcapping:
        facts["final_logit_softcapping"] = config.final_logit_softcapping
    if config.enable_moe_block:
        facts |= {
            "expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    return facts


def write(path, model, without=(), add_tokenizer=add_tokenizer):
    facts = {name: fact for name, fact in facts_of(model.config).items() if name not in without}
    writer = new_writer(path, "gemma4", facts, "gemma4.")
    add_tokenizer(writer)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        scale = next((theirs for ours, theirs in SCALES.items() if name.endswith(ours)), None)
        bare = table.get_name(name)  # of a weight without a suffix
        theirs = table.get_name(name, (".weight",)) if bare is None else f"{bare}.weight"
        writer.add_tensor(f"blk.{name.split('.')[2]}.{scale}" if scale else theirs, tensor.numpy())
    writer.add_tensor("rope_freqs.weight", torch.tensor([1.0] * 4 + [1e30] * 12).numpy())
    finish(writer)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_model_that_was_written(tmp_path, kind):
    model = random_model(kind)
    loaded = load_model(write(tmp_path / "model.gguf", model), torch.float32, CPU, 1, pack=False)

    check_tree_attention(loaded)
    tokens = torch.randint(1, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), own_attention(loaded.model):
        found, expected = (each(tokens, use_cache=False).logits for each in (loaded.model, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fact", ["attention.sliding_window_pattern", "attention.key_length_swa"])
def test_a_fact_that_is_missing_is_named(tmp_path, fact):
    file = write(tmp_path / "model.gguf", random_model("dense"), without=[fact])

    with pytest.raises(YggdrasilError, match=f"its {fact} is None"):
        load_model(file, torch.float32, CPU, 1)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_its_tokenizer_is_that_of_transformers_with_a_beginning_of_text(tmp_path, kind):
    named = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>")
    tokens = [*named, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helowrd123", "▁w", "ll", "he", "hell", "hello"]
    merges = ["h e", "l l", "he ll", "▁ w", "hell o"]

    def add(writer):
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if each in named else 6 if each.startswith("<0x") else 1 for each in tokens])
        writer.add_token_merges(merges)
        for name, number in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(True)

    file = write(tmp_path / "model.gguf", random_model(kind), add_tokenizer=add)
    theirs = GemmaTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, merges=[tuple(each.split()) for each in merges]
    )
    theirs.add_special_tokens({"extra_special_tokens": ["<|turn>", "<turn|>"]})

    ours, text = load_tokenizer(file), "hello world  12<turn|>ö"
    assert list(ours.encode(text)) == [2, *theirs.encode(text, add_special_tokens=False)]
    assert ours.decode(ours.encode(text)[1:]) == text
    assert (
        tokens.index("<turn|>")
        in json.loads((Source.find(file).folder / "generation_config.json").read_text())["eos_token_id"]
    )
