"""A head is tried under both conventions of counting layers; the better is taken and said, and none is refused."""

import pytest
import torch
from gguf_files import tiny_model
from head_files import eagle_config, published_tensors, write_head
from tiny_pair import VOCAB_SIZE, make_pair
from transformers import AutoModelForCausalLM, Gemma2Config

from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.heads import convention
from yggdrasil.drafters.heads.eagle.config import HEAD_INPUT
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.heads.own_text import OPENING, own_text
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.native_steps.loading import load_described

WRITTEN = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}  # outputs, unless the writer erred


@pytest.fixture(scope="module")
def pair():
    return make_pair(num_hidden_layers=6, hidden_size=32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def taught(pair, folder, layers):
    """A head that has learned the target's choices from the outputs of ``layers``."""
    torch.manual_seed(0)
    config = eagle_config(VOCAB_SIZE, drafted=VOCAB_SIZE, **WRITTEN)
    tensors = published_tensors(config)
    head, _ = open_head(write_head(folder, config, tensors), torch.float32)
    embedding = pair.plain_target.get_input_embeddings().weight.detach()
    tokens, choices, outputs = own_text(pair.target, set(layers))
    tokens, choices = tokens.clone(), choices.clone()  # made in inference mode
    states = torch.cat([outputs[layer].clone() for layer in layers], dim=-1)[:, :-1]
    head.requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    rows = torch.arange(states.shape[1])
    for _ in range(60):
        logits = head.logits(head(embedding[tokens[:, 1:]], head.feature(states), rows, convention._causal))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), choices[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return write_head(folder, config, {name: tensor.detach() for name, tensor in head.state_dict().items()})


@pytest.mark.parametrize("layers", [(1, 2, 4), (0, 1, 3)], ids=["as the writer means", "one off"])
def test_the_reading_that_agrees_is_taken_and_said_once(pair, cache, tmp_path, capsys, layers):
    folder = taught(pair, tmp_path / "head", layers)
    loaded = load_head(folder, pair.target, 1)
    assert loaded.readings == [(1, 2, 4), (0, 1, 3)]

    assert convention.with_detected_layers(loaded, pair.target, "0" * 16).layers == layers
    assert f"outputs of layers {', '.join(map(str, layers))}" in capsys.readouterr().err

    assert convention.with_detected_layers(loaded, pair.target, "0" * 16).layers == layers  # from the cache
    assert capsys.readouterr().err == ""
    for file in (cache / "heads").iterdir():
        file.write_text("damaged")
    assert convention.with_detected_layers(loaded, pair.target, "0" * 16).layers == layers
    assert "outputs of layers" in capsys.readouterr().err


@pytest.mark.usefixtures("cache")
def test_a_head_that_guesses_nothing_is_refused(pair, tmp_path):
    config = eagle_config(VOCAB_SIZE, drafted=8)
    tensors = published_tensors(config)
    unused = sorted(set(range(VOCAB_SIZE)) - set(own_text(pair.target, {1})[1].flatten().tolist()))[:8]
    assert len(unused) == 8
    tensors["d2t"] = torch.tensor(unused) - torch.arange(8)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(unused), True)
    loaded = load_head(write_head(tmp_path / "head", config, tensors), pair.target, 1)

    with pytest.raises(YggdrasilError, match=r"hardly predicts the target's tokens, 0% from .* another target"):
        convention.with_detected_layers(loaded, pair.target, "0" * 16)


def test_a_target_that_bounds_its_scores_draws_its_text_too():
    """PyTorch's attention does not: transformers refuses Gemma 2 with it."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    loaded = prepare_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), "gemma2", num_threads=1)

    tokens, choices, outputs = own_text(loaded, {0, 1})

    assert tokens.shape == choices.shape
    assert [outputs[layer].shape for layer in (0, 1)] == [(*tokens.shape, 32)] * 2


@pytest.mark.skipif(not is_native(), reason="the native library is not there")
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_native_steps_draw_a_text_with_what_transformers_computes_on_it(model_type, tmp_path):
    """Also over layers with a window, which is shorter than the texts."""
    model = tiny_model(model_type, hidden_size=32, sliding_window=16).float()
    model.save_pretrained(tmp_path)
    target = load_described(Source.find(tmp_path), torch.float32, 1, "full", lambda: model)
    assert target is not None

    tokens, choices, outputs = own_text(target, {HEAD_INPUT, 0, 1})

    with torch.inference_mode():
        wanted = model(tokens, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(outputs[0], wanted.hidden_states[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[HEAD_INPUT], wanted.hidden_states[-1], rtol=1e-4, atol=1e-5)
    assert (choices == wanted.logits.argmax(-1)).float().mean() > 0.99
    assert torch.equal(own_text(target, {0}).tokens, tokens)


def reading(layers, agreement, likelihoods):
    return convention.Reading(layers, agreement, torch.tensor(likelihoods))


@pytest.mark.usefixtures("cache")
def test_more_guesses_by_chance_do_not_decide(pair, tmp_path, monkeypatch, capsys):
    undraftable = [float("nan")] * 4
    found = {
        (1, 2, 4): reading((1, 2, 4), 0.32, [-1.0, -2.0, -3.0, -1.0, *undraftable]),
        (0, 1, 3): reading((0, 1, 3), 0.34, [-2.0, -0.9, -2.9, -0.9, *undraftable]),
    }
    monkeypatch.setattr(convention, "_reading", lambda *given: found[given[-1]])
    config = eagle_config(VOCAB_SIZE, **WRITTEN)
    loaded = load_head(write_head(tmp_path / "head", config, published_tensors(config)), pair.target, 1)

    assert convention.with_detected_layers(loaded, pair.target, "0" * 16).layers == (1, 2, 4)
    assert "hardly differs" in capsys.readouterr().err


def test_choices_that_cannot_be_drafted_are_left_out(pair, tmp_path):
    config = eagle_config(VOCAB_SIZE, drafted=8, **WRITTEN)
    loaded = load_head(write_head(tmp_path / "head", config, published_tensors(config)), pair.target, 1)
    _, choices, _ = own_text(pair.target, {1})
    drafted = loaded.loaded.model.head.target_tokens(torch.arange(8))
    wanted = choices[:, 1:][:, OPENING:].flatten()

    for found in convention._tried(loaded, pair.target):
        assert torch.equal(found.likelihoods.isnan(), ~torch.isin(wanted, drafted))


def test_a_reading_is_clearly_better_where_choices_are_steadily_likelier():
    usual = reading((1, 2, 4), 0.32, [-1.0, -2.0, -3.0, -1.5])
    likelier = reading((0, 1, 3), 0.30, [-0.9, -1.8, -2.9, -1.4])
    undraftable = reading((0, 1, 3), 0.30, [float("nan")] * 4)

    assert convention._is_clearly_better(likelier, usual)
    for other in (usual, undraftable):
        assert not convention._is_clearly_better(other, usual)
    assert not convention._is_clearly_better(usual, likelier)
