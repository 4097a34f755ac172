"""The self-check refuses a model for a wrong function, naming layer and term, and never for rounding."""

import dataclasses
import random
from typing import get_args

import pytest
import torch
from examples import ALL
from recurrent_models import recurrent_model
from tiny import FAMILIES, sharpened, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM

from yggdrasil.checkpoints.formats.names import K_FORMATS, Weights
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.runtime import selfcheck, step_cache
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.selfcheck import check_tree_attention

native_only = pytest.mark.skipif(not is_native(), reason="quantised weights need the native kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_model_is_never_refused(family, dtype):
    check_tree_attention(prepare_model(tiny_model(family).to(dtype), family, 1))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "granite", "phi3"])
def test_random_configurations_are_not_refused(family):
    """Shapes, weights' sizes and scales are drawn (3,000 with ``--all``); large weights make rounding extreme."""
    draw = random.Random(family)
    for _ in range(500 if ALL else 5):
        config = tiny_config(family)
        config.num_attention_heads = draw.choice([2, 4, 8])
        config.num_key_value_heads = draw.choice([heads for heads in (1, 2, 4) if heads <= config.num_attention_heads])
        if getattr(config, "head_dim", None):
            config.head_dim = draw.choice([8, 16, 32, 48])
        config.vocab_size = draw.choice([33, 97, 1000])
        config.pad_token_id = 0
        config.eos_token_id = config.bos_token_id = 1
        torch.manual_seed(draw.randrange(1000))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        sharpened(model, draw.choice([0.1, 1, 8, 30]))
        check_tree_attention(prepare_model(model.to(draw.choice([torch.float32, torch.bfloat16])), family, 1))


@native_only
@pytest.mark.parametrize("family", FAMILIES if ALL else ["llama", "gemma3", "qwen2", "llama4"])
@pytest.mark.parametrize("weights", get_args(Weights)[2:] if ALL else ["q8_0", "q4_0"])
def test_rounded_weights_are_not_refused(family, weights):
    """On blocks of few bits wide logits differ by several per cent between two right ways to compute them."""
    from yggdrasil.checkpoints.formats.rounding import rounding_to

    if weights in K_FORMATS:
        pytest.importorskip("llama_cpp", reason="ggml quantises K formats")
    model = sharpened(tiny_model(family).to(torch.bfloat16), 3)
    check_tree_attention(prepare_model(model, family, 1, quantise=rounding_to(weights, model)))


@pytest.mark.parametrize(
    ("family", "term", "wrong"),
    [("mistral", "sliding_window", None), ("gemma2", "softcap", None), ("granite", "scaling", 0.21)],
)
def test_a_term_that_tree_attention_leaves_out_is_named(family, term, wrong, monkeypatch):
    right = selfcheck.tree_attention

    def without(*inputs, **terms):
        return right(*inputs, **terms | {term: wrong})

    loaded = prepare_model(tiny_model(family), family, 1)
    monkeypatch.setattr(selfcheck, "tree_attention", without)

    with pytest.raises(YggdrasilError, match=rf"attention of layer 0, called with .*{term} .*, differ by \d+\.\d%"):
        check_tree_attention(loaded)


@pytest.mark.parametrize(
    "counted", [lambda positions: positions * 2, lambda positions: positions - positions.min()], ids=["twice", "from 0"]
)
def test_positions_that_a_step_counts_otherwise_are_found(counted, monkeypatch):
    """Counted from the pass's first row, positions are wrong only behind a text."""
    loaded = prepare_model(tiny_model("llama"), "llama", 1)
    rotary = loaded.model.model.rotary_emb
    forward = rotary.forward
    calls = []

    def shifted(states, position_ids):
        calls.append(position_ids)
        return forward(states, position_ids if len(calls) == 1 else counted(position_ids))

    monkeypatch.setattr(rotary, "forward", shifted)

    with pytest.raises(YggdrasilError, match=r"the queries of layer 0 differ by"):
        check_tree_attention(loaded)


class CountingBart(BartForCausalLM):
    """Takes positions and ignores them: BART's decoder counts by the length of its cache."""

    def forward(self, input_ids=None, position_ids=None, **options):
        return super().forward(input_ids, **options)


CountingBart.__module__ = BartForCausalLM.__module__  # whose code transformers looks for attention functions


def test_a_model_that_ignores_its_positions_is_found():
    sizes = {f"{half}_{size}": 1 for half in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    config = BartConfig(vocab_size=50, d_model=16, decoder_ffn_dim=16, **sizes)

    with pytest.raises(YggdrasilError, match=r"the queries of layer 0 differ by"):
        check_tree_attention(prepare_model(CountingBart(config).eval(), "bart", 1))


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "granite"])
def test_recurrent_layers_that_read_siblings_are_found(family, monkeypatch):
    """Every row follows the one before it, as in a text."""
    monkeypatch.setattr(step_cache, "parents_of", lambda mask: torch.arange(-1, len(mask) - 1))

    with pytest.raises(YggdrasilError, match=r"the outputs of layer 0 differ by"):
        check_tree_attention(recurrent_model(family).loaded)


def test_the_text_is_read_where_it_is_given():
    """At once, and as in decoding: its first half, then a tree in which the rest has siblings."""
    loaded = prepare_model(tiny_model("llama"), "llama", 1)
    seen = []
    loaded.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))

    check_tree_attention(loaded, [5, 6, 7])

    assert seen == [[5, 6, 7], [5, 6], [7, 5]]


def test_a_layer_that_attends_twice_in_a_pass_is_found():
    """Looped models keep other keys for each round, where a step has one cache a layer."""
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]

    with pytest.raises(YggdrasilError, match="layer 0 attends more than once in a pass"):
        check_tree_attention(prepare_model(model, "llama", 1))


def test_key_heads_that_the_configuration_does_not_say_are_found():
    loaded = prepare_model(tiny_model("llama"), "llama", 1)
    other = dataclasses.replace(loaded.sizes, key_heads=((4, 16),) * 2)

    with pytest.raises(YggdrasilError, match=r"layer 0 has 2 key heads of 16 numbers where .* says 4 of 16"):
        check_tree_attention(dataclasses.replace(loaded, sizes=other))


def test_layers_that_pass_no_arguments_on_are_named(monkeypatch):
    """transformers' Nemotron drops what its attention function is to receive."""
    loaded = prepare_model(tiny_model("llama"), "llama", 1)
    attention = type(loaded.model.model.layers[0].self_attn)
    own = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *given, selfcheck=None, **others: own(*given, **others))

    with pytest.raises(YggdrasilError, match="its layers pass no keyword arguments on to the attention function"):
        check_tree_attention(loaded)
