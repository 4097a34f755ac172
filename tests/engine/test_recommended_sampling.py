"""What a model's files say of sampling, and what is taken where they say nothing."""

import json

import gguf
import numpy as np
import pytest
from gguf_files import finish

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.engine.recommended_sampling import describe, recommended_sampling


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
            SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1),
        ),
        ({"do_sample": True}, SamplingParams(temperature=1.0, top_k=50)),
        ({"top_k": 64, "top_p": 0.95}, SamplingParams(temperature=1.0, top_k=64, top_p=0.95)),
        ({"do_sample": False, "temperature": 0.7}, GREEDY),
        ({"temperature": 0}, GREEDY),
        ({"do_sample": True, "temperature": -3, "top_p": "x", "top_k": True}, SamplingParams(top_k=50)),
    ],
)
def test_a_generation_config_is_followed(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    found = recommended_sampling(tmp_path, None)

    assert found.params == expected
    assert found.origin == "the model's generation_config"


def test_the_metadata_of_a_gguf_file_are_followed(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 64)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    found = recommended_sampling(tmp_path, tmp_path / "m.gguf")

    assert found.params == SamplingParams(temperature=0.6, top_k=64)
    assert found.describe() == "temperature 0.6, top-k 64 (the file's own)"


@pytest.mark.parametrize("text", [None, "{}", "[]", "no JSON", '{"eos_token_id": 2}'])
def test_a_model_that_names_none_has_the_usual(tmp_path, text):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    found = recommended_sampling(tmp_path, None)

    assert found.params.temperature == 0.8
    assert "the model names none" in found.origin
    assert describe(GREEDY) == "greedy"
