"""OpenAI's newer endpoint through its own SDK: the same answers as a chat's."""

import json

import openai
import pytest
from bundled_server import Weather
from openai.types.responses import Response

TEXT = "Write a function"
CHAT = [{"role": "user", "content": TEXT}]


def test_the_answer_is_the_chats(server, sdk, alone):
    reply = server.post("/v1/responses", input=TEXT, max_output_tokens=16)
    Response.model_validate(reply, strict=True)
    found = sdk.responses.create(model="tiny", input=TEXT, instructions="Be brief", max_output_tokens=16)
    turns = [{"role": "system", "content": "Be brief"}, *CHAT]

    assert found.output_text == alone.chat(turns, max_new_tokens=16).text
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.usage.output_tokens == 16
    assert reply["output"][0]["content"][0]["text"] == alone.chat(CHAT, max_new_tokens=16).text


def test_a_stream_builds_the_same(sdk):
    whole = sdk.responses.create(model="tiny", input=CHAT, max_output_tokens=16)
    kinds, text = [], ""
    with sdk.responses.stream(model="tiny", input=CHAT, max_output_tokens=16) as events:
        for event in events:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        final = events.get_final_response() if "response.completed" in kinds else None

    assert text == whole.output_text
    assert final is None or final.output_text == text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def test_structured_answers_are_parsed(sdk):
    parsed = sdk.responses.parse(model="tiny", input=CHAT, text_format=Weather, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Weather)
    with sdk.responses.stream(model="tiny", input=CHAT, text_format=Weather, max_output_tokens=200) as events:
        assert events.get_final_response().output_parsed == parsed.output_parsed


def test_tools_are_called_and_their_results_go_back(sdk):
    parameters = {**Weather.model_json_schema(), "additionalProperties": False}
    tool = {"type": "function", "name": "weather", "parameters": parameters, "strict": True}
    fields = {"model": "tiny", "tools": [tool], "max_output_tokens": 200}
    (call,) = sdk.responses.create(**fields, input=CHAT, tool_choice="required").output
    with sdk.responses.stream(**fields, input=CHAT, tool_choice={"type": "function", "name": "weather"}) as events:
        (streamed,) = events.get_final_response().output
    assert call.type == streamed.type == "function_call"
    assert call.arguments == streamed.arguments
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    after = sdk.responses.create(model="tiny", input=[*CHAT, call, result], max_output_tokens=4)
    assert after.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"previous_response_id": "resp_1"}, "not stored"),
        ({"input": [{"type": "image_generation_call"}]}, "image_generation_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "more than text"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"temperature": "hot"}, "temperature"),
        ({"input": []}, "messages"),
        ({"n": 2}, "one answer"),
    ],
)
def test_what_is_not_served_is_said(server, given, said):
    assert said in server.post("/v1/responses", 400, **{"input": TEXT, **given})["error"]["message"]


def test_there_are_no_embeddings(server, sdk):
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        sdk.embeddings.create(model="tiny", input="a")
