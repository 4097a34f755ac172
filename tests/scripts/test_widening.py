"""A widened checkpoint computes what its source computes, and has the shape and the weights it is said to have."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import widen
import widening.checkpoint as checkpoint_module
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from typer.testing import CliRunner
from widening import (
    RANDOM,
    SIZES,
    ModelShape,
    place_heads,
    read_shape,
    resolve_shape,
    widen_checkpoint,
    widen_in_memory,
)

from yggdrasil.errors import YggdrasilError

NUM_TOKENS = 12
NARROW = ModelShape(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=128
)
BUNDLED_TARGET = ModelShape(320, 8, 5, 5, 64, 864, 4096)
BUNDLED_DRAFTER = ModelShape(128, 2, 2, 2, 64, 384, 4096)
FAMILIES: dict[str, tuple[Any, Any, dict[str, object]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
}


def save_source(
    folder: Path, *, family: str = "llama", dtype: torch.dtype = torch.float32, shard: str = "1GB", **options: object
) -> Path:
    """Save a random model whose every part matters: large weights, uneven norms, biases, a large eps."""
    config_class, model_class, family_options = FAMILIES[family]
    settings: dict[str, object] = {
        "hidden_size": NARROW.hidden_size,
        "num_hidden_layers": NARROW.num_layers,
        "num_attention_heads": NARROW.num_heads,
        "num_key_value_heads": NARROW.num_kv_heads,
        "head_dim": NARROW.head_dim,
        "intermediate_size": NARROW.intermediate_size,
        "vocab_size": NARROW.vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 0.05,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    model = model_class(config_class(**(settings | family_options | options)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"tokenizer": 1}')
    (folder / "README.md").write_text("figures of the source")
    return folder


def load(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping
    return tensors


def shape_of(model: Any) -> ModelShape:
    """Read the shape off the weights that were loaded, not off the configuration that says it."""
    layer = model.model.layers[0]
    head_dim = layer.self_attn.head_dim
    vocab_size, hidden_size = model.model.embed_tokens.weight.shape
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=len(model.model.layers),
        num_heads=layer.self_attn.q_proj.weight.shape[0] // head_dim,
        num_kv_heads=layer.self_attn.k_proj.weight.shape[0] // head_dim,
        head_dim=head_dim,
        intermediate_size=layer.mlp.gate_proj.weight.shape[0],
        vocab_size=vocab_size,
    )


def assert_same_function(source: Path, wide: Path, shape: ModelShape) -> None:
    narrow_model, wide_model = load(source), load(wide)
    assert shape_of(wide_model) == shape
    vocab_size = narrow_model.config.vocab_size
    prompt = torch.randint(vocab_size, (4, 12), generator=torch.Generator().manual_seed(2))
    expected = narrow_model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    assert expected.shape == (4, 12 + NUM_TOKENS)
    assert torch.equal(wide_model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False), expected)
    with torch.inference_mode():
        narrow_logits, wide_logits = narrow_model(expected).logits, wide_model(expected).logits
    assert narrow_logits.std() > 0.5  # else closeness would say little
    torch.testing.assert_close(wide_logits[..., :vocab_size], narrow_logits, rtol=1e-4, atol=1e-4)


WIDER = {
    "hidden": {"hidden_size": 96},
    "hidden by a power of four": {"hidden_size": 256},
    "layers": {"num_layers": 5},
    "heads": {"num_heads": 8, "num_kv_heads": 4},
    "more heads a group": {"num_heads": 8, "num_kv_heads": 2},
    "fewer heads a group": {"num_heads": 4, "num_kv_heads": 4},
    "head_dim x2": {"head_dim": 32},
    "head_dim x3": {"head_dim": 48},
    "head_dim x4": {"head_dim": 64},
    "intermediate": {"intermediate_size": 160},
    "vocabulary": {"vocab_size": 200},
    "all": {
        "hidden_size": 120,
        "num_layers": 5,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 32,
        "intermediate_size": 160,
        "vocab_size": 200,
    },
}


@pytest.mark.parametrize(
    ("wider", "dtype"),
    [*((each, torch.float32) for each in WIDER.values()), (WIDER["all"], torch.bfloat16)],
    ids=[*WIDER, "all in bfloat16"],
)
def test_every_dimension_can_be_widened(tmp_path: Path, wider: dict[str, int], dtype: torch.dtype) -> None:
    source = save_source(tmp_path / "source", dtype=dtype)
    shape = replace(NARROW, **wider)

    report = widen_checkpoint(source, tmp_path / "wide", shape)

    assert_same_function(source, tmp_path / "wide", shape)
    assert report.shape == shape
    assert report.num_parameters == sum(tensor.numel() for tensor in stored(tmp_path / "wide").values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_families_with_biases_and_windows(tmp_path: Path, family: str, is_tied: bool) -> None:
    source = save_source(tmp_path / "source", family=family, tie_word_embeddings=is_tied)
    shape = replace(NARROW, **WIDER["all"])

    widen_checkpoint(source, tmp_path / "wide", shape)

    assert_same_function(source, tmp_path / "wide", shape)
    assert ("lm_head.weight" in stored(tmp_path / "wide")) is not is_tied
    biases = [tensor for name, tensor in stored(tmp_path / "wide").items() if name.endswith("bias")]
    assert len(biases) == shape.num_layers * {"llama": 7, "mistral": 0, "qwen2": 3}[family]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_frequencies_survive_a_larger_head(tmp_path: Path, rope: dict[str, object]) -> None:
    source = save_source(tmp_path / "source", rope_parameters=rope)
    shape = replace(NARROW, head_dim=64)

    widen_checkpoint(source, tmp_path / "wide", shape)

    assert_same_function(source, tmp_path / "wide", shape)


def test_only_real_parts_write_and_all_other_new_weights_are_of_real_size(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", attention_bias=False, mlp_bias=False)
    shape = replace(NARROW, hidden_size=96, num_layers=5, num_heads=8, num_kv_heads=4, intermediate_size=160)
    widen_checkpoint(source, tmp_path / "wide", shape)
    narrow, wide = stored(source), stored(tmp_path / "wide")

    mute = [layer for layer in range(shape.num_layers) if not wide[f"model.layers.{layer}.mlp.down_proj.weight"].any()]

    assert len(mute) == shape.num_layers - NARROW.num_layers
    assert mute != list(range(NARROW.num_layers, shape.num_layers))  # spread, not appended
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        assert wide[f"{prefix}self_attn.o_proj.weight"].any() == (layer not in mute)
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            weight = wide[f"{prefix}{module}.weight"]
            rows, columns = narrow[f"model.layers.0.{module}.weight"].shape
            assert weight.shape[0] > rows
            for new in (weight[rows:], weight[:, columns:]):
                assert (new != 0).all()
                assert new.std().item() == pytest.approx(0.2, rel=0.1)
        for module in ("input_layernorm", "post_attention_layernorm"):
            new = wide[f"{prefix}{module}.weight"][NARROW.hidden_size :]
            assert new.mean().item() == pytest.approx(math.sqrt(64 / 96), rel=0.2)
    assert not wide["model.embed_tokens.weight"][:, NARROW.hidden_size :].any()


def test_a_factor_that_bfloat16_would_round_is_stored_in_float32(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", dtype=torch.bfloat16)
    widen_checkpoint(source, tmp_path / "inexact", replace(NARROW, hidden_size=96, head_dim=32))
    widen_checkpoint(source, tmp_path / "exact", replace(NARROW, hidden_size=256, head_dim=64))

    for name, tensor in stored(tmp_path / "inexact").items():
        is_scaled = "norm" in name or "q_proj" in name
        assert tensor.dtype == (torch.float32 if is_scaled else torch.bfloat16), name
    assert {tensor.dtype for tensor in stored(tmp_path / "exact").values()} == {torch.bfloat16}


def test_new_vocabulary_rows_repeat_the_least_likely_token(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", tie_word_embeddings=False)
    with torch.no_grad():
        model = load(source)
        model.model.embed_tokens.weight += torch.randn(64)  # gives all hidden states a common part
        states = model.model(torch.arange(128)[None]).last_hidden_state[0]
        model.lm_head.weight[37] = -states.mean(0)
        model.save_pretrained(source)

    report = widen_checkpoint(source, tmp_path / "probed", replace(NARROW, vocab_size=200))
    named = widen_checkpoint(source, tmp_path / "named", replace(NARROW, vocab_size=200), filler_token=5)

    assert report.filler_token == 37
    assert report.filler_probability is not None
    assert 0 < report.filler_probability < 1e-6
    assert (named.filler_token, named.filler_probability) == (5, None)
    for folder, filler in ((tmp_path / "probed", 37), (tmp_path / "named", 5)):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weight = stored(folder)[name]
            assert torch.equal(weight[128:], weight[filler].expand(72, -1))


def test_untie_writes_an_equal_output_head(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source")
    shape = replace(NARROW, hidden_size=96)

    widen_checkpoint(source, tmp_path / "wide", shape, untie=True)

    head, embedding = (stored(tmp_path / "wide")[name] for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert torch.equal(head[:, :64], embedding[:, :64])
    assert (head[:, 64:] != 0).all()
    assert load(tmp_path / "wide").config.tie_word_embeddings is False
    assert_same_function(source, tmp_path / "wide", shape)


def test_shards_are_read_and_written(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", shard="40KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    shape = replace(NARROW, hidden_size=96)

    report = widen_checkpoint(source, tmp_path / "wide", shape, max_shard_bytes=80_000)

    shards = sorted((tmp_path / "wide").glob("*.safetensors"))
    assert len(shards) > 2
    assert [path.name for path in shards] == [
        f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))
    ]
    assert all(path.stat().st_size < 85_000 for path in shards)
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert index["metadata"]["total_size"] == report.num_parameters * 4
    assert_same_function(source, tmp_path / "wide", shape)


def test_the_folder_holds_tokenizer_and_origin_but_no_card(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source")
    (tmp_path / "wide").mkdir()  # an empty folder is taken

    widen_checkpoint(source, tmp_path / "wide", replace(NARROW, num_layers=3))

    assert {path.name for path in (tmp_path / "wide").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "widening.json",
    }
    assert (tmp_path / "wide" / "tokenizer.json").read_text() == '{"tokenizer": 1}'
    assert json.loads((tmp_path / "wide" / "widening.json").read_text())["widened_from"] == asdict(NARROW)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 256


REFUSED = {
    "smaller": ({"hidden_size": 32}, "--hidden-size must be at least the source's 64"),
    "fewer key-value heads": ({"num_kv_heads": 1}, "--num-kv-heads must be at least the source's 2"),
    "ragged groups": ({"num_heads": 8, "num_kv_heads": 3}, "--num-heads 8 is not a multiple of --num-kv-heads 3"),
    "head_dim by a fraction": ({"head_dim": 24}, "--head-dim 24 is not a multiple"),
    "hidden and heads": ({"hidden_size": 66}, "--hidden-size 66 is not a multiple of --num-heads 4"),
}


@pytest.mark.parametrize(("wider", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_impossible_shapes_are_refused(tmp_path: Path, wider: dict[str, int], sentence: str) -> None:
    source = save_source(tmp_path / "source")

    with pytest.raises(YggdrasilError, match=sentence):
        widen_checkpoint(source, tmp_path / "wide", replace(NARROW, **wider))

    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_rotary_scaling_that_depends_on_the_head_is_refused_only_for_larger_heads(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    source = save_source(tmp_path / "source", rope_parameters=rope)

    with pytest.raises(YggdrasilError, match="--head-dim must stay 16: rotary scaling of type dynamic"):
        widen_checkpoint(source, tmp_path / "larger", replace(NARROW, head_dim=32))
    widen_checkpoint(source, tmp_path / "wide", replace(NARROW, hidden_size=96))

    assert_same_function(source, tmp_path / "wide", replace(NARROW, hidden_size=96))


def test_checkpoints_that_cannot_be_widened_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path / "gpt2")
    source = save_source(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    for name in ("damaged", "listed", "weightless", "foreign"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "damaged" / "config.json").write_text("[" * 100_000)
    (tmp_path / "listed" / "config.json").write_text("[]")
    extra = stored(source) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    save_file(extra, tmp_path / "foreign" / "model.safetensors")

    for name, sentence in {
        "gpt2": "is GPT2LMHeadModel; only LlamaForCausalLM",
        "empty": "holds no config.json",
        "damaged": "is not valid JSON",
        "listed": "is not a JSON mapping",
        "weightless": r"holds no \*.safetensors file",
        "foreign": "holds model.layers.0.self_attn.q_norm.weight",
    }.items():
        with pytest.raises(YggdrasilError, match=sentence):
            widen_checkpoint(tmp_path / name, tmp_path / "wide", replace(NARROW, num_layers=3))
    with pytest.raises(YggdrasilError, match="--filler-token 128 is not in"):
        widen_checkpoint(source, tmp_path / "wide", replace(NARROW, vocab_size=200), filler_token=128)
    assert not (tmp_path / "wide").exists()


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_source(tmp_path / "source")

    def fail(*_args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint_module, "_write_config", fail)
    with pytest.raises(YggdrasilError, match=r"cannot write .*wide \(No space left on device\)"):
        widen_checkpoint(source, tmp_path / "wide", replace(NARROW, num_layers=3))

    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_placement_keeps_every_query_head_with_its_key_value_head() -> None:
    """Each accepted placement maps as the definition says; each refusal names the least count that is accepted."""
    for num_kv, group in ((1, 1), (1, 3), (2, 2), (3, 1), (5, 1), (2, 4)):
        narrow = replace(NARROW, num_heads=num_kv * group, num_kv_heads=num_kv)
        for wide_heads in range(narrow.num_heads, 17):
            accepted: list[int] = []
            named: list[int] = []
            for wide_kv in (count for count in range(1, wide_heads + 1) if wide_heads % count == 0):
                wide = replace(NARROW, num_heads=wide_heads, num_kv_heads=wide_kv)
                try:
                    queries, keys = place_heads(narrow, wide)
                except YggdrasilError as error:
                    named.append(int(str(error).rstrip(".").rsplit(" ", 1)[1]))
                    continue
                accepted.append(wide_kv)
                assert (len(queries), len(keys)) == (wide_heads, wide_kv)
                assert sorted(head for head in queries if head != RANDOM) == list(range(narrow.num_heads))
                for position, head in enumerate(queries):
                    if head != RANDOM:
                        assert keys[position // (wide_heads // wide_kv)] == head // group
            assert set(named) <= {accepted[0]}


@pytest.mark.parametrize(
    "source",
    [
        BUNDLED_TARGET,
        BUNDLED_DRAFTER,
        ModelShape(576, 30, 9, 3, 64, 1536, 49152),  # SmolLM2-135M
        ModelShape(2304, 26, 9, 3, 96, 9216, 256000),  # no dimension of it is a divisor of a known size's
        ModelShape(5120, 40, 40, 40, 128, 13824, 32000),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_every_known_size_fits_every_source(source: ModelShape, size: str) -> None:
    """Dimensions that suffice stay as they are."""
    shape = resolve_shape(source, size, {})

    place_heads(source, shape)
    assert all(getattr(shape, name) >= least for name, least in asdict(source).items())
    assert shape.head_dim % source.head_dim == 0
    assert shape.hidden_size % shape.num_heads == 0
    for name in ("num_layers", "intermediate_size", "num_heads"):
        assert getattr(shape, name) == max(getattr(SIZES[size], name), getattr(source, name))


def test_named_dimensions_go_over_those_of_a_size() -> None:
    shape = resolve_shape(BUNDLED_TARGET, "llama3-8b", {"vocab_size": 8192, "num_layers": None})
    assert shape == replace(SIZES["llama3-8b"], vocab_size=8192)
    assert resolve_shape(BUNDLED_TARGET, "7B", {}).vocab_size == 4096
    assert resolve_shape(NARROW, None, {"num_heads": 8}) == replace(NARROW, num_heads=8, num_kv_heads=4)
    with pytest.raises(YggdrasilError, match="There is no size '9B'; the sizes are 100M"):
        resolve_shape(NARROW, "9B", {})
    with pytest.raises(YggdrasilError, match="Nothing to widen: give --size"):
        resolve_shape(NARROW, None, {"num_heads": None})


def test_the_command_widens_and_refuses_in_one_sentence(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(widen.main)
    source = save_source(tmp_path / "source")
    arguments = ["--checkpoint", str(source), "--out", str(tmp_path / "wide"), "--num-layers=3", "--vocab-size=200"]

    done = CliRunner().invoke(app, arguments)
    again = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    assert "New vocabulary rows repeat token" in done.output
    assert read_shape(tmp_path / "wide") == replace(NARROW, num_layers=3, vocab_size=200)
    assert again.exit_code == 2
    assert again.stderr.strip().count("\n") == 0
    assert f"{tmp_path / 'wide'} already exists and is not an empty folder" in again.stderr


def test_widening_in_memory_gives_the_model_that_is_written(tmp_path: Path) -> None:
    shape = replace(NARROW, **WIDER["all"])
    source = save_source(tmp_path / "source", dtype=torch.bfloat16)
    widen_checkpoint(source, tmp_path / "wide", shape, seed=5)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    model = widen_in_memory(source, shape, torch.device("cpu"), seed=5)

    assert model.config.to_dict() | {"_name_or_path": ""} == written.config.to_dict() | {"_name_or_path": ""}
    torch.testing.assert_close(model.state_dict(), written.state_dict(), rtol=0, atol=0)
