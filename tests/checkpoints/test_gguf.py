"""A GGUF file loads as the model that was written to it; what is damaged or not understood is one sentence."""

import contextlib
import json

import gguf
import numpy as np
import pytest
import torch
from full_disk import full_disk
from gguf import GGMLQuantizationType as Kind
from gguf_files import NAMES, TEMPLATE, add_tokenizer, finish, tiny_model, write_gguf
from tiny import FAMILIES
from tiny_pair import byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import GenerationConfig

from yggdrasil import native
from yggdrasil.artifacts import gguf as reader
from yggdrasil.artifacts import model_fingerprint, tokenizer_fingerprint
from yggdrasil.artifacts.gguf import read_gguf_header, read_gguf_layout
from yggdrasil.checkpoints import usual_weights as usual
from yggdrasil.checkpoints.facts import load_config, load_tokenizer
from yggdrasil.checkpoints.shards import raising_os_errors
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.engine.recommended_sampling import recommended_sampling
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loading import load_model

CPU = torch.device("cpu")
native_only = pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Prepared copies of these files; the compiled kernels are loaded already."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))


@torch.no_grad()
def logits(model):
    return model(torch.arange(1, 40)[None], use_cache=False).logits[0]


def own_logits(path, dtype=torch.float32):
    """As our loader makes the model, by its own attention."""
    model = load_model(path, dtype, CPU, 1, pack=False).model
    model.set_attn_implementation("eager")
    return logits(model)


@pytest.mark.parametrize("family", [family for family in NAMES if not family.startswith("gemma")])
def test_a_file_gives_the_logits_of_the_model_that_was_written(tmp_path, family):
    model = tiny_model(family)
    assert logits(model).argmax(-1).unique().numel() > 5, "flat logits would show nothing"

    written = own_logits(write_gguf(tmp_path / "model.gguf", model, family))

    torch.testing.assert_close(written, logits(model), rtol=1e-4, atol=1e-4)


def gemma(family, **changes):
    """With layers of both kinds, and scores that no file says how to scale: by the width of a head."""
    layers = {"gemma2": 3, "gemma3": 7}[family]
    kinds = ["sliding_attention", "full_attention"] * layers
    if family == "gemma3":
        kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    options = {"num_hidden_layers": layers, "layer_types": kinds[:layers], "query_pre_attn_scalar": 16}
    return tiny_model(family, **options, head_dim=16, sliding_window=7, tie_word_embeddings=True, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "facts"),
    [
        ("gemma2", {}, {}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, {}),
        ("gemma3", {}, {}),
        ("gemma3", {"linear": 8.0}, {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}),
        ("gemma3", {"near": 2000.0}, {"gemma3.rope.freq_base_swa": 2000.0}),
    ],
    ids=["gemma2", "gemma2 with other bounds", "gemma3", "gemma3 stretched", "gemma3 with other near positions"],
)
def test_a_file_of_a_gemma_gives_the_logits_of_the_model_that_was_written(tmp_path, family, changes, facts):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    near = {"rope_type": "default", "rope_theta": changes.pop("near", 1e4)}
    if factor := changes.pop("linear", None):
        rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": factor}
    if family == "gemma3":
        changes = {**changes, "rope_parameters": {"full_attention": rope, "sliding_attention": near}}
    model = gemma(family, **changes)
    bounds = {name: getattr(model.config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    facts = {**facts, **{f"{family}.{name}": bound for name, bound in bounds.items() if bound is not None}}
    written = own_logits(write_gguf(tmp_path / "model.gguf", model, family, facts=facts))

    assert written.argmax(-1).unique().numel() > 5, "flat logits would show nothing"
    torch.testing.assert_close(written, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemmas_of_27b_scale_scores_by_another_number(tmp_path, family, layers):
    """Which files do not hold: the state's share of a head."""
    kinds = ["full_attention"] * layers
    model = tiny_model(family, num_hidden_layers=layers, layer_types=kinds, head_dim=32, sliding_window=7)
    file = write_gguf(tmp_path / "model.gguf", model, family)

    assert load_config(file).query_pre_attn_scalar == model.config.hidden_size // model.config.num_attention_heads != 32


def test_a_tied_model_and_one_with_llama3_positions(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    stretched = tiny_model("llama", tie_word_embeddings=True, rope_parameters=scaling)
    plain = tiny_model("llama", tie_word_embeddings=True)
    frequencies = [layer.rotary_emb.inv_freq for layer in (plain.model, stretched.model)]
    factors = (frequencies[0] / frequencies[1]).numpy()
    assert factors.max() == pytest.approx(8.0)

    file = write_gguf(tmp_path / "model.gguf", stretched, more={"rope_freqs.weight": factors})

    torch.testing.assert_close(own_logits(file), logits(stretched), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_positions_are_stretched_evenly_where_no_rule_is_named(tmp_path, name):
    """As llama.cpp does, which also knows the factor by an older name."""
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    stretched = tiny_model("llama", rope_parameters=scaling)
    file = write_gguf(tmp_path / "model.gguf", stretched, facts={f"llama.{name}": 4.0})

    torch.testing.assert_close(own_logits(file), logits(stretched), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "qwen2"])
def test_heads_that_are_turned_in_part_are_refused(tmp_path, family):
    """Where the file does not say how wide a head is: 16 channels, of which the model turns 8."""
    model = tiny_model(family)
    assert not getattr(model.config, "head_dim", None)
    file = write_gguf(tmp_path / "model.gguf", model, family, facts={f"{family}.rope.dimension_count": 8})

    with pytest.raises(YggdrasilError, match=r"by a rule \(of 8 of 16 channels\) that is unsupported in GGUF"):
        load_config(file)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.BF16])
def test_quantised_weights_are_what_gguf_says_they_are(tmp_path, kind):
    """Also in bfloat16, rounded once."""
    model = tiny_model("llama")
    file = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    weight = model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))

    for dtype in (torch.float32, torch.bfloat16):
        found = load_model(file, dtype, CPU, 1, pack=False).model.model.layers[0].mlp.down_proj.weight
        assert torch.equal(found, expected.to(dtype))


def assert_nearly_alike(full, kept, share=0.1):
    """Logits of one model with numbers and with blocks, within the rounding of what meets these."""
    for loaded in (full, kept):
        loaded.model.set_attn_implementation("eager")
    expected, ours = logits(full.model), logits(kept.model)
    assert (ours - expected).std() < share * expected.std()


@native_only
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_blocks_may_stay_as_they_are(tmp_path, kind):
    """Every linear layer and both tables, rows in the model's order; logits within the rounding of the inputs."""
    model = tiny_model("llama", tie_word_embeddings=kind != Kind.Q8_0)
    file = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    full, kept = (load_model(file, torch.float32, CPU, 1, weights=weights) for weights in ("full", "file"))

    assert list(kept.formats.values()) == [kind] * (2 + 7 * model.config.num_hidden_layers)
    attention = [loaded.model.model.layers[0].self_attn for loaded in (full, kept)]
    x = torch.randn(3, 64)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        expected, ours = (getattr(each, name)(x) for each in attention)
        torch.testing.assert_close(ours, expected, rtol=0.03, atol=0.03 * expected.std().item())
    assert_nearly_alike(full, kept)


@native_only
def test_a_gemmas_head_is_the_files_blocks(tmp_path):
    """Its embedding multiplies what it reads, so it stays one of numbers; the head must not."""
    file = write_gguf(tmp_path / "model.gguf", gemma("gemma3"), "gemma3", Kind.Q8_0)
    full, kept = (load_model(file, torch.float32, CPU, 1, weights=weights) for weights in ("full", "file"))

    assert list(kept.formats.values()) == [Kind.Q8_0] * (1 + 7 * kept.num_layers)
    assert_nearly_alike(full, kept)


@native_only
def test_a_quantised_file_is_decoded_as_it_is_unless_asked_otherwise(tmp_path, monkeypatch):
    """On a CPU with kernels, in bfloat16; never what has no blocks, and never in the arithmetic of comparisons."""
    quantised = write_gguf(tmp_path / "quantised.gguf", tiny_model("llama"), kind=Kind.Q4_1)
    halves = write_gguf(tmp_path / "halves.gguf", tiny_model("llama"), kind=Kind.F16)
    tiny_model("llama").save_pretrained(tmp_path / "folder")

    assert usual_weights(str(quantised), "bfloat16", "cpu") == "file"
    assert usual_weights(str(quantised), "float32", "cpu") == "full"
    assert usual_weights(str(quantised), "bfloat16", "cuda") == "full"
    for other in (halves, tmp_path / "folder"):
        assert usual_weights(str(other), "bfloat16", "cpu") == "full"
    monkeypatch.setattr(usual, "is_native", lambda: False)
    assert usual_weights(str(quantised), "bfloat16", "cpu") == "full"


@native_only
def test_what_the_kernels_do_not_read_is_a_number_each(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), kind=Kind.F16)
    full, kept = (load_model(file, torch.float32, CPU, 1, weights=weights) for weights in ("full", "file"))

    assert kept.formats == {}
    assert kept.tensors.keys() == full.tensors.keys()


def test_a_converted_folder_names_its_class(tmp_path):
    """Other programs, and ``scripts/widen``, tell the architecture by it."""
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    folder = Source.find(file).checkpoint(torch.float32)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_folder_has_no_blocks_to_keep(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)

    with pytest.raises(YggdrasilError, match=r"^--weights file reads the blocks of a GGUF file or .* has none; use"):
        load_model(tmp_path, torch.float32, CPU, 1, weights="file")


def test_tokenizer_template_and_end_tokens_come_from_the_file(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=96))

    tokenizer = load_tokenizer(file)

    text = "another test, 42"
    assert tokenizer(text)["input_ids"] == byte_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<end>"
    assert '"eos_token_id": [\n    0,\n    5\n  ]' in (Source.find(file).folder / "generation_config.json").read_text()
    assert load_config(file).max_position_embeddings == 256


@pytest.mark.parametrize(
    ("spelling", "names_turn", "ends"),
    [
        ("<end_of_turn>", True, [0, 5, 68]),
        ("<end_of_turn>", False, [0, 68]),
        ("<|endoftext|>", False, [0, 68]),
        ("<|file_sep|>", False, [0, 68]),
        ("<|fim_pad|>", False, [0, 68]),
        ("<|im_start|>", False, [0]),
    ],
)
def test_an_answer_ends_at_what_the_metadata_and_the_usual_spellings_mark(
    tmp_path, monkeypatch, spelling, names_turn, ends
):
    write_with(monkeypatch, {"?": spelling}, names_turn=names_turn)
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=96))

    assert GenerationConfig.from_pretrained(Source.find(file).folder).eos_token_id == ends


def test_in_harmony_format_the_end_of_a_message_ends_no_answer(tmp_path, monkeypatch):
    write_with(monkeypatch, {"?": "<|return|>", "!": "<|call|>", "-": "<|end|>"}, names_turn=False)
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=96))

    ends = GenerationConfig.from_pretrained(Source.find(file).folder).eos_token_id
    tokens = read_gguf_header(file).facts["tokenizer.ggml.tokens"]
    assert {tokens[token] for token in ends} == {"<|return|>", "<|call|>", tokens[0]}


def write_with(monkeypatch, replaced, *, names_turn):
    """Have ``write_gguf`` spell tokens otherwise, and name the token that ends a turn or not."""

    def named(writer, add=add_tokenizer):
        add(writer)
        facts = writer.kv_data[0]
        tokens = facts["tokenizer.ggml.tokens"].value
        for old, new in replaced.items():
            tokens[tokens.index(old)] = new
        if not names_turn:
            del facts["tokenizer.ggml.eot_token_id"]

    monkeypatch.setattr("gguf_files.add_tokenizer", named)


def test_it_is_prepared_once_and_again_when_what_was_kept_is_damaged(tmp_path, capfd):
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    first = own_logits(file)
    assert capfd.readouterr().err.count("\n") == 2
    forget()
    own_logits(file)
    assert capfd.readouterr().err == ""

    weights = Source.find(file).checkpoint(torch.float32) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    forget()
    assert torch.equal(own_logits(file), first)
    assert "again, since what was kept is damaged" in capfd.readouterr().err


def forget():
    """As a new process."""
    from yggdrasil.checkpoints import source

    source._gguf_facts.cache_clear()
    source._gguf_weights.cache_clear()


def test_fingerprints_follow_the_content_and_not_the_place(tmp_path):
    model = tiny_model("llama")
    file = write_gguf(tmp_path / "model.gguf", model)
    digits = model_fingerprint(file), tokenizer_fingerprint(file)
    copied = tmp_path / "other.gguf"
    data = bytearray(file.read_bytes())
    copied.write_bytes(data)
    assert (model_fingerprint(copied), tokenizer_fingerprint(copied)) == digits

    data[-20] ^= 1
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(data)
    assert model_fingerprint(changed) != digits[0]
    assert tokenizer_fingerprint(changed) == digits[1]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.6, 0.999])
def test_a_truncated_file_is_one_sentence(tmp_path, share):
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])

    with pytest.raises(YggdrasilError, match=r"model\.gguf is (damaged or truncated|not a GGUF file)") as refused:
        load_model(file, torch.float32, CPU, 1)
    assert "unpack" not in str(refused.value), "Python's own sentence"


def test_a_damaged_header_is_one_sentence_or_harmless(tmp_path):
    """No byte of it, whatever its value, leads to anything else."""
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    data, end = file.read_bytes(), read_gguf_header(file).data_start
    random = np.random.default_rng(0)
    for trial in range(300):
        damaged = bytearray(data)
        damaged[random.integers(end)] = random.integers(256)
        other = tmp_path / f"{trial}.gguf"
        other.write_bytes(damaged)
        with contextlib.suppress(YggdrasilError):
            layout = read_gguf_layout(other)
            assert all(tensor.start + tensor.num_bytes <= len(data) for tensor in layout.tensors.values())
            assert read_gguf_header(other).tensors == layout.tensors
        other.unlink()


def test_a_start_holds_no_vocabulary_to_find_the_tensors(tmp_path, monkeypatch):
    """Python objects of a vocabulary of 262,144 tokens take 80 MB, and leave gaps of 30 MB."""
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    whole = read_gguf_header(file)
    monkeypatch.setattr(reader._Reader, "_strings", lambda *_: pytest.fail("the vocabulary is read"))

    layout = read_gguf_layout(file)

    assert layout.tensors == whole.tensors
    assert layout.facts == {name: fact for name, fact in whole.facts.items() if not isinstance(fact, list)}
    assert recommended_sampling(None, file).origin == "llama.cpp's, the model names none"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": False}, "holds no tokenizer"),
        ({"leave_out": ["blk.1.ffn_up.weight"]}, r"lacks blk\.1\.ffn_up\.weight"),
        ({"leave_out": ["token_embd.weight"]}, r"lacks the tensor token_embd\.weight"),
        ({"more": {"blk.0.extra.weight": np.zeros((2, 2), np.float32)}}, r"holds blk\.0\.extra\.weight, unknown"),
        ({"facts": {"llama.block_count": 2**24}}, r"its block_count is 16777216, and it has 21 tensors; fetch"),
        ({"facts": {"llama.block_count": "2"}}, r"metadata is inconsistent: .*num_hidden_layers.* expected int"),
        ({"facts": {"llama.rope.freq_base": "10000"}}, r"its rope\.freq_base is '10000', which is no positive number"),
        ({"facts": {"llama.rope.scaling.factor": float("nan")}}, r"its rope\.scaling\.factor is nan, which is no"),
        ({"facts": {"llama.rope.scaling.type": "other"}}, r"scales rotary positions by a rule \(other\)"),
        ({"facts": {"llama.rope.scaling.type": "yarn"}}, r"its rope\.scaling\.original_context_length is 0, which"),
        ({"more": {"rope_freqs.weight": np.array([1, 5, 2], np.float32)}}, r"by a rule \(of its own\)"),
    ],
)
def test_what_cannot_be_loaded_rightly_is_refused(tmp_path, options, message):
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), **options)

    with pytest.raises(YggdrasilError, match=message):
        load_model(file, torch.float32, CPU, 1)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("architecture", "num_parts", "has_model", "said"),
    [
        ("mamba", 1, True, "is of architecture mamba, which is unsupported in GGUF files; supported"),
        ("llama", 3, True, r"model\.gguf is one of the 3 parts of a model; join them with"),
        ("llama", 3, False, r"model\.gguf is one of the 3 parts of a model; join them with"),
    ],
)
def test_another_architecture_or_a_part_of_a_model_is_named(tmp_path, architecture, num_parts, has_model, said):
    """The first part describes the model; the others hold tensors alone."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_uint16("split.count", num_parts)
    if not has_model:
        del writer.kv_data[0]["general.architecture"]
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)

    with pytest.raises(YggdrasilError, match=said):
        load_model(tmp_path / "model.gguf", torch.float32, CPU, 1)


def test_a_folder_with_a_gguf_file_alone_points_to_it(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"))

    with pytest.raises(YggdrasilError, match=r"holds no config\.json; give the file .*model\.gguf"):
        Source.find(tmp_path)


def test_every_family_here_is_one_that_steps_serve():
    assert set(NAMES) <= set(FAMILIES)


def test_a_full_disk_is_a_sentence_where_the_tokenizer_is_written(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    with full_disk(1500), pytest.raises(YggdrasilError, match=r"cannot write .*facts \(File too large\); check"):
        Source.find(tmp_path / "model.gguf")

    assert [file for file in (tmp_path / "cache").rglob("*.*") if file.parent.name != "notes"] == []


def test_what_is_no_fault_of_the_disk_stays_what_it_is():
    with pytest.raises(OSError, match="No space left on device"), raising_os_errors():
        Tokenizer(BPE()).save("/dev/full")
    for error in (Exception("of another kind"), RuntimeError("(os error 28)")):
        with pytest.raises(type(error)) as raised, raising_os_errors():
            raise error
        assert raised.value is error
