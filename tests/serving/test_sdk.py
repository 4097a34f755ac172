"""What people do with the openai SDK beyond plain answers: at once, tools, structured answers, its own streams."""

import asyncio
import json

import openai
from bundled_server import Weather

CHAT = [{"role": "user", "content": "Warm or cold?"}]


def test_answers_asked_for_at_once(server, sdk):
    alone = sdk.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12).choices[0].message.content

    async def ask_all():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        async def one():
            stream = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(*(one() for _ in range(3)))

    assert asyncio.run(ask_all()) == [alone] * 3


def test_structured_answers_are_parsed(sdk):
    parsed = sdk.chat.completions.parse(model="tiny", messages=CHAT, response_format=Weather, max_tokens=60)

    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_tools_are_called_whole_and_streamed(sdk):
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    wanted = {"model": "tiny", "messages": CHAT, "tools": tools, "tool_choice": "required", "max_tokens": 80}
    (call,) = sdk.chat.completions.create(**wanted).choices[0].message.tool_calls
    with sdk.chat.completions.stream(**wanted) as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls

    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert streamed.function.parsed_arguments == Weather.model_validate_json(call.function.arguments)
