"""What cannot be verified as a tree is refused, and why; so is a drafter with another tokenizer."""

import json

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_config
from tiny_pair import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    LlamaConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
)

from yggdrasil import native
from yggdrasil.checkpoints import facts
from yggdrasil.checkpoints.facts import (
    check_drafter_tokenizer,
    check_same_tokenizer,
    load_config,
    load_tokenizer,
    refuse_unverifiable,
)
from yggdrasil.checkpoints.families import cache_name
from yggdrasil.checkpoints.model_sizes import ModelSizes, longest_text
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime import loading
from yggdrasil.runtime.loading import load_model, prepare_model
from yggdrasil.runtime.selfcheck import check_tree_attention

WORDS = ["<unk>", "def", "f", "(", "x", ")", ":", "return", "hello", "world"]
CPU = torch.device("cpu")
native_only = pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "RecurrentGemma", "Jamba", "KimiLinear", "Rwkv"])
def test_recurrent_layers_of_other_kinds_are_refused_with_the_reason(name):
    config = getattr(transformers, f"{name}Config")()

    with pytest.raises(YggdrasilError, match=r"^mine .*recurrent layers .*no tree can be verified.*served are"):
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

    with pytest.raises(YggdrasilError, match=r"^mine: BloomForCausalLM has its own attention code"):
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
    assert not any(tensor.requires_grad for tensor in loaded.tensors.values())


def test_a_refused_checkpoint_is_not_even_read(tmp_path):
    transformers.MambaConfig().save_pretrained(tmp_path)  # no weights beside it

    with pytest.raises(YggdrasilError, match="recurrent layers alone"):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(YggdrasilError, match=r"holds no config\.json"):
        load_config(tmp_path)
    with pytest.raises(YggdrasilError, match=r"there is no folder or \.gguf file .*, and it is no hub id"):
        load_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(YggdrasilError, match=r"config\.json could not be read: \S"):
        load_config(tmp_path)
    tiny_llama_config().save_pretrained(tmp_path)
    with pytest.raises(YggdrasilError, match=r"has no \*\.safetensors weights; save the model again"):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)
    with pytest.raises(YggdrasilError, match=r"the tokenizer could not be loaded: \S"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("value", ["x", "1", [None], {"a": 1}])
def test_a_tokenizer_with_a_setting_of_another_type_is_refused_when_loaded(tmp_path, value):
    """Not at the first prompt."""
    tiny_llama_config().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("a")["input_ids"]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": value}))

    with pytest.raises(YggdrasilError, match=r"the tokenizer could not be loaded: '>' not supported"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "max_position_embeddings",
            10**29,
            r"config\.json is inconsistent: max_position_embeddings is 1\d+, not from 0 to",
        ),
        ("max_position_embeddings", "x", r"config\.json could not be read: Validation error for field 'max_pos.*'x'"),
        ("max_position_embeddings", -1, r"config\.json is inconsistent: max_position_embeddings is -1, not from 0"),
        ("num_hidden_layers", 10**5, r"config\.json is inconsistent: num_hidden_layers is 100000, more than"),
        ("num_hidden_layers", None, r"config\.json (could not be read|is inconsistent): \S"),
    ],
)
def test_a_field_that_cannot_be_is_refused_wherever_it_is_read(tmp_path, field, value, message):
    tiny_llama_config().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))

    with pytest.raises(YggdrasilError, match=message):
        load_config(tmp_path)


def test_a_tokenizer_that_fails_on_the_configuration_says_so(tmp_path):
    tiny_llama_config().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')

    with pytest.raises(YggdrasilError, match=r"config\.json could not be read: .*hidden_size"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("wish", ["output_hidden_states", "output_attentions", "return_dict"])
@pytest.mark.parametrize("value", [True, False, 3.5])
def test_a_checkpoints_wishes_for_outputs_change_nothing(tmp_path, wish, value):
    AutoModelForCausalLM.from_config(tiny_llama_config()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    tokens = torch.arange(5)[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = model(tokens).logits
    path.write_text(json.dumps(json.loads(path.read_text()) | {wish: value}))

    loaded = load_model(tmp_path, torch.float32, CPU, num_threads=1, pack=False).model
    loaded.set_attn_implementation("eager")

    output = loaded(tokens)
    torch.testing.assert_close(output.logits, expected)
    assert output.hidden_states is None


def saved_tensors(folder, **changes):
    """A tiny checkpoint whose tensors are changed as ``changes`` say: None drops one."""
    AutoModelForCausalLM.from_config(tiny_llama_config()).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{LAYER}mlp.up_proj.weight": None}, r"lacks model\.layers\.0\.mlp\.up_proj\.weight: its weights"),
        ({"lm_head.weight": None}, r"lacks lm_head\.weight"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(16, 16)}, r"beyond what the model has, model\.layers\.1"),
        ({f"{LAYER}input_layernorm.weight": torch.zeros(8)}, r"misshapen .*norm\.weight \(\[8\], not \[16\]\)"),
    ],
)
def test_weights_that_are_not_the_models_are_named(tmp_path, changes, message):
    """Else what is missing would stay random."""
    saved_tensors(tmp_path, **changes)

    with pytest.raises(YggdrasilError, match=message):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)


def test_tensors_that_every_loader_ignores_may_be_there(tmp_path):
    saved_tensors(tmp_path, **{f"{LAYER}self_attn.rotary_emb.inv_freq": torch.zeros(4)})

    load_model(tmp_path, torch.float32, CPU, num_threads=1)


def test_a_pickle_is_refused_and_a_truncated_file_named(tmp_path):
    saved_tensors(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(YggdrasilError, match=r"model\.safetensors is truncated"):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(YggdrasilError, match=r"only pytorch_model\.bin, a pickle"):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 3},
        {"num_key_value_heads": 3, "head_dim": 8},
        {"num_key_value_heads": 0},
        {"vocab_size": 0},
        {"hidden_size": "many"},
        {"num_hidden_layers": None},
    ],
)
def test_a_config_that_does_not_fit_together_is_one_sentence(tmp_path, changes):
    AutoModelForCausalLM.from_config(tiny_llama_config()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))

    with pytest.raises(YggdrasilError, match="config"):
        load_model(tmp_path, torch.float32, CPU, num_threads=1)


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


def test_the_tokenizer_of_a_drafter_is_opened_only_if_its_files_differ(tmp_path, monkeypatch):
    for name, words in (("target", WORDS), ("same", WORDS), ("other", [*WORDS[:4], "y", *WORDS[5:]])):
        tiny_llama_config().save_pretrained(tmp_path / name)
        tiny_tokenizer(words).save_pretrained(tmp_path / name)
    target = load_tokenizer(tmp_path / "target")
    with pytest.raises(YggdrasilError, match="token 4 is 'x' in the first and 'y' in the second"):
        check_drafter_tokenizer(target, str(tmp_path / "target"), str(tmp_path / "other"))
    monkeypatch.setattr(facts, "load_tokenizer", None)
    check_drafter_tokenizer(target, str(tmp_path / "target"), str(tmp_path / "same"))


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


# ==== weights of fewer bits ====


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tied model whose inputs are whole blocks, but for one layer in each: 96 inputs, 64 and 80."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@native_only
def test_rounded_weights_are_those_of_the_gguf_package(checkpoint):
    full = AutoModelForCausalLM.from_pretrained(checkpoint)
    loaded = load_model(checkpoint, torch.float32, CPU, 1, weights="q4_0")

    table = torch.from_numpy(rounded_by_gguf(full.model.embed_tokens.weight, "Q8_0"))
    ids = torch.arange(50)
    assert torch.equal(loaded.model.model.embed_tokens(ids), table)
    head, table = loaded.model.lm_head, loaded.model.model.embed_tokens
    assert head.packed is table.packed
    for ours, theirs in zip(loaded.model.model.layers, full.model.layers, strict=True):
        x = torch.randn(3, 64)
        expected = x @ torch.from_numpy(rounded_by_gguf(theirs.mlp.up_proj.weight, "Q4_0")).T
        torch.testing.assert_close(ours.mlp.up_proj(x), expected, atol=0.02 * expected.std(), rtol=0.02)
        assert type(ours.mlp.down_proj) is PackedLinear  # 80 inputs are no whole blocks


@native_only
@pytest.mark.parametrize("weights", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_the_logits_of_a_rounded_model_are_near_those_of_its_weights(checkpoint, weights):
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for module in reference.modules():
            if isinstance(module, torch.nn.Linear) and module.in_features % 32 == 0 and module is not reference.lm_head:
                module.weight.copy_(torch.from_numpy(rounded_by_gguf(module.weight, weights.upper())))
        reference.lm_head.weight.copy_(torch.from_numpy(rounded_by_gguf(reference.lm_head.weight, "Q8_0")))
    loaded = load_model(checkpoint, torch.float32, CPU, 1, weights=weights)
    check_tree_attention(loaded)
    loaded.model.set_attn_implementation("eager")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected, ours = (model(tokens, use_cache=False).logits for model in (reference, loaded.model))

    assert (ours - expected).square().mean().sqrt() < 0.03 * expected.std()


def rounded_by_gguf(weight, name):
    form = GGMLQuantizationType[name]
    return quants.dequantize(quants.quantize(weight.detach().numpy(), form), form)


def test_weights_of_fewer_bits_need_native_kernels_on_a_cpu(checkpoint, monkeypatch):
    monkeypatch.setattr(loading, "is_native", lambda: False)
    with pytest.raises(YggdrasilError, match=r"--weights q8_0 needs the native kernels.*install g\+\+"):
        load_model(checkpoint, torch.float32, CPU, 1, weights="q8_0")


def test_a_cache_goes_by_the_name_that_the_models_forward_gives_it():
    class Renamed(torch.nn.Module):
        def forward(self, tokens, cache=None, **others):
            return tokens

    class Older(torch.nn.Module):
        def forward(self, tokens, past_key_values=None, **others):
            return tokens

    assert (cache_name(Renamed()), cache_name(Older())) == ("cache", "past_key_values")


def test_longrope_reaches_as_far_as_it_was_first_trained(tmp_path):
    """Behind that transformers turns all rows otherwise, those that are kept too."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "intermediate_size": 64, "vocab_size": 96, "pad_token_id": 0}  # fmt: skip
    config = Phi3Config(**sizes, max_position_embeddings=512, original_max_position_embeddings=64, rope_parameters=rope)

    assert ModelSizes.of(config).max_context == longest_text(config) == 64
    assert longest_text(Phi3Config(**sizes, max_position_embeddings=512)) == 512


@pytest.mark.parametrize("skips", [False, True])
def test_a_model_that_tree_attention_does_not_compute_is_refused(checkpoint, monkeypatch, skips):
    loaded = load_model(checkpoint, torch.float32, CPU, 1)
    check_tree_attention(loaded)
    attention = loaded.model.model.layers[0].self_attn
    forward = attention.forward

    def other(hidden_states, **given):
        """Another term, or another way of its own, where the step's cache is given."""
        if "step_cache" not in given:
            return forward(hidden_states, **given)
        return (hidden_states, None) if skips else (forward(hidden_states, **given)[0] + 1.0, None)

    monkeypatch.setattr(attention, "forward", other)
    with pytest.raises(YggdrasilError, match=r"the outputs of layer 0 differ by \d+.\d% of"):
        check_tree_attention(loaded)


def test_a_model_that_takes_no_positions_is_refused():
    """BART's decoder counts positions by the length of its cache: rows of a tree at one depth would have several."""
    model = BartForCausalLM(BartConfig(vocab_size=50, d_model=16, decoder_layers=1, decoder_attention_heads=2))

    with pytest.raises(YggdrasilError, match="BartForCausalLM counts positions itself and takes none"):
        prepare_model(model, "bart", 1)
