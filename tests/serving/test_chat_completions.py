"""Chat completions: equal to the library, framed and shaped as clients expect."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from yggdrasil import SamplingParams

CHAT = [{"role": "user", "content": "Write a function"}]


def test_the_answer_is_the_librarys(server, alone):
    reply = server.post("/v1/chat/completions", messages=CHAT, max_tokens=40)
    expected = alone.chat(CHAT, max_new_tokens=40)

    ChatCompletion.model_validate(reply, strict=True)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert reply["usage"]["completion_tokens"] == 40
    timings = reply["timings"]
    assert timings["draft_n"] > 0
    assert timings["prompt_per_token_ms"] * timings["prompt_n"] == pytest.approx(timings["prompt_ms"])
    assert timings["prompt_per_second"] * timings["prompt_ms"] == pytest.approx(1e3 * timings["prompt_n"])


def test_an_answer_begins_a_turn_and_a_completion_does_not(server, monkeypatch):
    begins_turn_of, start = [], server.worker.decoder.start

    def listening(prompt, **options):
        begins_turn_of.append(options["begins_turn"])
        return start(prompt, **options)

    monkeypatch.setattr(server.worker.decoder, "start", listening)
    server.post("/v1/chat/completions", messages=CHAT, max_tokens=2)
    server.post("/v1/completions", prompt="Write", max_tokens=2)

    assert begins_turn_of == [True, False]


def test_the_stream_says_the_same(server, alone):
    expected = alone.chat(CHAT, max_new_tokens=40)
    chunks = server.stream(
        "/v1/chat/completions", messages=CHAT, max_completion_tokens=40, stream_options={"include_usage": True}
    )

    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert all(chunk[name] == chunks[0][name] for name in ("id", "created", "system_fingerprint"))
    *parts, last, usage = chunks
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == expected.text
    assert all(part["choices"][0]["finish_reason"] is None and part["usage"] is None for part in parts)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 40
    assert usage["timings"] == last["timings"]


def test_usage_is_streamed_only_where_asked_for(server):
    chunks = server.stream("/v1/chat/completions", messages=CHAT, max_tokens=4)

    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_sampling_parameters_reach_the_decoder(server, alone):
    given = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logit_bias": {"50": -100.0}}
    chunks = server.stream("/v1/chat/completions", messages=CHAT, max_tokens=24, n=2)
    assert [i for i, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
    reply = server.post("/v1/chat/completions", messages=CHAT, max_tokens=24, **given, n=2)
    expected = [
        alone.chat(
            CHAT, max_new_tokens=24,
            sampling=SamplingParams(temperature=0.9, top_p=0.9, seed=seed, logit_bias={50: -100.0}),
        ).text
        for seed in (7, 8)
    ]  # fmt: skip

    assert [choice["message"]["content"] for choice in reply["choices"]] == expected
    assert expected[0] != expected[1]
    assert reply["usage"]["completion_tokens"] == 48


@pytest.mark.parametrize(
    "given", [{"temperature": 0, "top_p": 0}, {"temperature": 1, "top_p": 0}, {"temperature": 1e-8}, {"top_p": 0.0}]
)
def test_what_leaves_the_best_token_alone_is_greedy(server, alone, given):
    (choice,) = server.post("/v1/chat/completions", messages=CHAT, max_tokens=12, **given)["choices"]

    assert choice["message"]["content"] == alone.chat(CHAT, max_new_tokens=12).text


def test_stop_strings_of_any_count_never_show_in_a_stream(server, alone):
    text = alone.chat(CHAT, max_new_tokens=40).text
    stop = text[12:18]
    given = {"stop": [stop, "never seen 1", "never seen 2", "never seen 3", "never seen 4"], "max_tokens": 40}
    chunks = server.stream("/v1/chat/completions", messages=CHAT, **given)

    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_logprobs_are_the_same_whole_and_streamed(server):
    given = {"messages": CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    whole = server.post("/v1/chat/completions", **given)["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in server.stream("/v1/chat/completions", **given)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]

    assert len(whole) == 12
    assert streamed == whole
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in whole)
    assert all(bytes(entry["bytes"]).decode(errors="ignore") in entry["token"] for entry in whole)


COUNTED = {"type": "object", "properties": {"count": {"enum": [1, 2]}}, "required": ["count"],
           "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"name": "counted", "schema": COUNTED, "strict": True}},
        {"type": "json_object", "schema": COUNTED},
    ],
)
def test_an_answer_of_a_schema_is_json_of_it(server, wanted):
    reply = server.chat(response_format=wanted, max_tokens=40)

    assert json.loads(reply["choices"][0]["message"]["content"]) in ({"count": 1}, {"count": 2})
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("speculation", [False, {"rule": "off"}, {"rule": "leviathan"}, {"exactness": "fixed-width"}])
def test_speculation_is_chosen_by_the_request(server, speculation):
    reply = server.chat(speculation=speculation, max_tokens=12)

    assert reply["usage"]["completion_tokens"] == 12
    assert (reply["timings"]["draft_n"] == 0) == (speculation in (False, {"rule": "off"}))


def test_earlier_turns_are_not_read_again(server):
    first = server.chat("A long enough question about nothing in particular", max_tokens=8)
    answer = first["choices"][0]["message"]["content"]
    turns = [
        {"role": "user", "content": "A long enough question about nothing in particular"},
        {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"},
    ]  # fmt: skip
    usage = server.post("/v1/chat/completions", messages=turns, max_tokens=8)["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
