"""Run by ``check_server.py`` in an environment of the clients: what people do with them, and what must come of it."""

import asyncio
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "What is bread?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    },
}


class Choice(BaseModel):
    """What a structured answer must be."""

    city: str
    warm: bool


def main(url: str, key: str) -> None:
    """All clients, one after the other; prints a line for each."""
    sdk = OpenAI(base_url=url, api_key=key, max_retries=0)
    model = sdk.models.list().data[0].id
    whole = use_sdk(sdk, model)
    asyncio.run(use_async_sdk(url, key, model, whole))
    tools = use_tools(sdk, model)
    print(f"openai {version('openai')}: sync, async, streamed, structured, errors, {tools}")
    use_langchain(url, key, model, whole)
    print(f"langchain-openai {version('langchain-openai')}: invoke, stream, structured")
    use_llm(url, key, model, whole)
    print(f"llm {version('llm')}: whole and streamed")


def use_sdk(sdk: OpenAI, model: str) -> str:
    """Whole, streamed, with log-probabilities, structured, refused, plain."""
    whole = sdk.chat.completions.create(model=model, messages=MESSAGES, max_tokens=32, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    stream = sdk.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with sdk.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=32) as events:
        assert "".join(event.delta for event in events if event.type == "content.delta") == text
    parsed = sdk.chat.completions.parse(model=model, messages=MESSAGES, response_format=Choice, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Choice)
    plain = sdk.completions.create(model=model, prompt="Bread is", max_tokens=8, echo=True, logprobs=1)
    assert plain.choices[0].text.startswith("Bread is")
    refused = ""
    try:
        sdk.chat.completions.create(model=model, messages=MESSAGES, temperature=-1.0)
    except openai.BadRequestError as error:
        refused = error.message
    assert "temperature" in refused
    return text


async def use_async_sdk(url: str, key: str, model: str, text: str) -> None:
    """Four answers at once, streamed."""
    sdk = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)

    async def one() -> str:
        stream = await sdk.chat.completions.create(model=model, messages=MESSAGES, max_tokens=32, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*(one() for _ in range(4))) == [text] * 4


def use_tools(sdk: OpenAI, model: str) -> str:
    """A call that is required, whole and streamed, where the model's template writes calls."""
    wanted: Any = {"model": model, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    try:
        reply = sdk.chat.completions.create(**wanted, max_tokens=100)
    except openai.BadRequestError as error:
        if "takes no tools" not in error.message:
            raise
        return "no tools (the model's template has none)"
    (call,) = reply.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    with sdk.chat.completions.stream(**wanted, max_tokens=100) as events:
        (again,) = events.get_final_completion().choices[0].message.tool_calls or []
    assert again.function.arguments == call.function.arguments
    return "tools"


def use_langchain(url: str, key: str, model: str, text: str) -> None:
    """Whole, streamed, structured."""
    chat = ChatOpenAI(base_url=url, api_key=key, model=model, max_tokens=32, max_retries=0)
    assert chat.invoke("What is bread?").content == text
    assert "".join(str(chunk.content) for chunk in chat.stream("What is bread?")) == text
    longer = ChatOpenAI(base_url=url, api_key=key, model=model, max_tokens=200, max_retries=0)
    assert isinstance(longer.with_structured_output(Choice, method="json_schema").invoke("Oslo"), Choice)


def use_llm(url: str, key: str, model: str, text: str) -> None:
    """By its own list of models, as the documents say."""
    fields = {"model_id": "mine", "model_name": model, "api_base": url, "api_key_name": "mine", "can_stream": True}
    lines = [f"{'- ' if not i else '  '}{name}: {json.dumps(value)}" for i, (name, value) in enumerate(fields.items())]
    Path("extra-openai-models.yaml").write_text("\n".join(lines) + "\n")  # the working folder is the user's own
    for more in (["--no-stream"], []):
        command = [str(Path(sys.executable).with_name("llm")), "-m", "mine", "--key", key, "-o", "max_tokens", "32"]
        done = subprocess.run([*command, *more, "What is bread?"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == text.strip(), done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
