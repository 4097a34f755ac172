"""Commands build the steps of their sampling before the first request, which would otherwise wait for them."""

import importlib
from types import SimpleNamespace

import pytest

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.engine.recommended_sampling import RecommendedSampling
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving import process

OWN = SamplingParams(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("arguments", "prepared"),
    [
        (["chat"], OWN),
        (["chat", "--temperature", 0.9], SamplingParams(temperature=0.9, top_k=20)),
        (["serve"], OWN),
        (["serve", "--greedy"], SamplingParams(temperature=1.0)),  # of requests that ask for it
        (["generate", "--prompt", "x", "--temperature", 0.5], SamplingParams(temperature=0.5)),
    ],
    ids=str,
)
def test_commands_prepare_their_sampling(monkeypatch, program, arguments, prepared):
    seen = []

    def prepare_sampling(*given):
        seen.append(given[0])
        raise YggdrasilError("enough was seen")

    decoder = SimpleNamespace(prepare_sampling=prepare_sampling)
    name, *options = arguments
    monkeypatch.setattr(importlib.import_module(f"yggdrasil.cli.{name}"), "open_decoder", lambda *_, **__: decoder)
    monkeypatch.setattr(process, "run_server", lambda opening, *_: opening())
    own = RecommendedSampling(OWN, "the file's own")
    monkeypatch.setattr("yggdrasil.engine.recommended_sampling.recommended_sampling_of", lambda _: own)
    code, _, err = program(name, "a/model", *options)

    assert seen == [prepared]
    assert code == 2
    assert "enough was seen" in err
