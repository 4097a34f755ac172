"""Bodies that are wrong in many places are wrong in few words."""

import pytest
from pydantic import ValidationError

from yggdrasil.serving.request_fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MANY = 1000
TURN = {"role": "user", "content": "a"}
TOOL_TURN = {"role": "assistant", "content": "a", "tool_calls": [0] * MANY}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [0] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}] * MANY}),
        (ChatRequest, {"messages": [TOOL_TURN] * MANY}),
        (ChatRequest, {"messages": [TURN], "tools": [0] * MANY}),
        (ChatRequest, {"messages": [TURN], "stop": [0] * MANY}),
        (ChatRequest, {"messages": [TURN], "bad_words": [0] * MANY}),
        (ChatRequest, {"messages": [TURN], "logit_bias": dict.fromkeys(map(str, range(MANY)), "a")}),
        (ChatRequest, {"messages": [TURN], "logit_bias": dict.fromkeys(map(str, range(MANY)), True)}),
        (ChatRequest, {"messages": [TURN], "speculation": {"expansion": ["a"] * MANY}}),
        (CompletionRequest, {"prompt": [1] * MANY + ["a"]}),
        (CompletionRequest, {"prompt": ["a"] * MANY + [1]}),
        (CompletionRequest, {"prompt": [[1]] * MANY + ["a"]}),
        (CompletionRequest, {"prompt": [["a"] * MANY] * MANY}),
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (TokenizeRequest, {"messages": [0] * MANY}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    ],
)
def test_faults_of_a_body_are_few_however_many_of_its_items_are_wrong(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)

    assert caught.value.error_count() <= 4  # one for each kind that a value may have


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": [1] * MANY + ["a"]}, f"prompt.{MANY}: Input should be a valid integer"),
        ("/v1/chat/completions", {"messages": [TURN] * MANY + [0]}, f"messages.{MANY}"),
        (
            "/v1/chat/completions",
            {"messages": [TURN], "logit_bias": {"7": 0.5, "8": "a"}},
            "the bias of '8' is no number",
        ),
    ],
)
def test_the_first_of_them_is_told(server, path, body, said):
    assert said in server.post(path, 400, **body)["error"]["message"]


def test_a_key_that_is_no_unicode_text_is_told(server):
    body = rb'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"\ud800": "a"}}'
    reply = server.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})

    assert reply.status_code == 400
    assert r"the bias of '\ud800' is no number" in reply.json()["error"]["message"]
