"""What cannot be verified as a tree is refused, and why; so is a drafter with another tokenizer."""

import pytest
import torch
import transformers
from tiny import FAMILIES, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from yggdrasil.errors import YggdrasilError
from yggdrasil.models.loading import (
    check_same_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
    prepare_model,
    refuse_unverifiable,
)

WORDS = ["<unk>", "def", "f", "(", "x", ")", ":", "return", "hello", "world"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "RecurrentGemma", "Qwen3Next", "Jamba", "FalconH1", "Rwkv"])
def test_recurrent_and_hybrid_models_are_refused_with_the_reason(name):
    config = getattr(transformers, f"{name}Config")()

    with pytest.raises(
        YggdrasilError, match=r"^mine .*a recurrent state holds one past only.*use a model with softmax"
    ):
        refuse_unverifiable(config, "mine")


def test_convolution_layers_are_refused_by_name():
    config = transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])

    with pytest.raises(YggdrasilError, match="mine has conv layers"):
        refuse_unverifiable(config, "mine")


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_decoder_models_are_refused_with_the_reason(name):
    with pytest.raises(YggdrasilError, match=r"^mine is an encoder-decoder model; .* decoder-only"):
        refuse_unverifiable(getattr(transformers, f"{name}Config")(), "mine")


def test_alibi_is_refused_with_the_reason():
    with pytest.raises(YggdrasilError, match=r"^mine uses relative or ALiBi positions"):
        refuse_unverifiable(transformers.FalconConfig(alibi=True), "mine")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_models_are_accepted(family):
    refuse_unverifiable(tiny_config(family), family)


def test_a_model_with_attention_of_its_own_is_refused_with_the_reason():
    config = transformers.BloomConfig(vocab_size=11, hidden_size=16, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config)

    with pytest.raises(YggdrasilError, match=r"^mine: BloomForCausalLM computes attention in its own way"):
        prepare_model(model, "mine", num_threads=1)


# ==== checkpoints on disk ====


def tiny_llama_config():
    return LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip


def test_a_saved_checkpoint_loads_in_the_dtype_asked_for(tmp_path):
    AutoModelForCausalLM.from_config(tiny_llama_config()).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16, CPU, num_threads=1)

    assert (loaded.dtype, loaded.max_context, loaded.num_layers, loaded.hidden_size) == (torch.bfloat16, 64, 1, 16)
    assert not any(tensor.requires_grad for tensor in loaded.named_tensors().values())


def test_a_refused_checkpoint_is_not_even_read(tmp_path):
    transformers.MambaConfig().save_pretrained(tmp_path)  # no weights beside it

    with pytest.raises(YggdrasilError, match="a recurrent state holds one past only"):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(YggdrasilError, match=r"holds no config\.json"):
        load_config(tmp_path)
    with pytest.raises(YggdrasilError, match="neither a folder nor a hub id"):
        load_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(YggdrasilError, match=r"the configuration could not be read: \S"):
        load_config(tmp_path)
    tiny_llama_config().save_pretrained(tmp_path)
    with pytest.raises(YggdrasilError, match=r"could not be loaded: \S"):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)
    with pytest.raises(YggdrasilError, match=r"the tokenizer could not be loaded: \S"):
        load_tokenizer(tmp_path)


# ==== tokenizers ====


def tiny_tokenizer(words, *, is_split=True):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    if is_split:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_equal_tokenizers_pass():
    check_same_tokenizer(tiny_tokenizer(WORDS), tiny_tokenizer(WORDS), ("a", "b"))


def test_a_padded_vocabulary_passes(tmp_path):
    """More rows in a model than tokens in its tokenizer: the tokenizers decide."""
    for name, vocab_size in (("target", 64), ("drafter", 32)):
        config = tiny_llama_config()
        config.vocab_size = vocab_size
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tiny_tokenizer(WORDS).save_pretrained(tmp_path / name)

    check_same_tokenizer(load_tokenizer(tmp_path / "target"), load_tokenizer(tmp_path / "drafter"), ("a", "b"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*WORDS[:4], "y", *WORDS[5:]], r"token 4 is 'x' in the first and 'y' in the second"),
        ([*WORDS[:7], "hello", "return", "world"], r"token 7 is 'return' in the first and 'hello' in the second"),
        (WORDS[:-1], r"token 9 is 'world' in the first and None in the second"),
        ([*WORDS, "more"], r"token 10 is None in the first and 'more' in the second"),
    ],
)
def test_the_first_difference_is_named(words, message):
    with pytest.raises(YggdrasilError, match=f"^a and b have different tokenizers: {message}; a drafter must share"):
        check_same_tokenizer(tiny_tokenizer(WORDS), tiny_tokenizer(words), ("a", "b"))


def test_equal_tokens_but_another_split_is_named():
    with pytest.raises(YggdrasilError, match=r"^a and b tokenize 'def f.* differently"):
        check_same_tokenizer(tiny_tokenizer(WORDS), tiny_tokenizer(WORDS, is_split=False), ("a", "b"))
