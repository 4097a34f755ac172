"""What a request leaves out of its sampling is as the model's files recommend, where the server says so."""

import pytest
from bundled_server import open_pair, serving, wait_until

from yggdrasil import SamplingParams
from yggdrasil.engine.recommended_sampling import RecommendedSampling
from yggdrasil.serving import service
from yggdrasil.serving.decoding_options import options_of, with_recommended_sampling
from yggdrasil.serving.request_fields import ChatRequest
from yggdrasil.serving.server_settings import Limits, ServerSettings

OWN = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, OWN),
        ({"temperature": 0.2}, SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1)),
        ({"repetition_penalty": 1.0, "seed": 4}, SamplingParams(temperature=0.6, top_p=0.9, seed=4)),
    ],
)
def test_what_is_left_out_is_the_models(given, expected):
    body = ChatRequest.model_validate({"messages": CHAT, **given})
    assert options_of(with_recommended_sampling(body, OWN), Limits(), max_new_tokens=1)["sampling"] == expected


def test_a_temperature_of_nothing_is_greedy_all_the_same():
    body = ChatRequest.model_validate({"messages": CHAT, "temperature": 0.0})
    assert options_of(with_recommended_sampling(body, OWN), Limits(), max_new_tokens=1)["sampling"] == SamplingParams()


def test_the_server_samples_so_and_shows_it(alone, monkeypatch):
    monkeypatch.setattr(service, "recommended_sampling_of", lambda decoder: RecommendedSampling(OWN, "a test's"))
    with serving(open_pair, ServerSettings(recommended_sampling=True)) as server:
        wait_until(lambda: server.worker.decoder is not None)
        reply = server.post("/v1/chat/completions", messages=CHAT, max_tokens=12, seed=3)
        shown = server.client.get("/v1/models").json()["data"][0]["meta"]["sampling"]
    own = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=3)

    assert reply["choices"][0]["message"]["content"] == alone.chat(CHAT, max_new_tokens=12, sampling=own).text
    assert "temperature 0.6" in shown
