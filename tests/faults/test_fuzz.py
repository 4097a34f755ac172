"""Any bytes as a prompt file, any text as an option's value: read, or refused in a sentence that names it."""

import json

import pytest
import typer
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from yggdrasil.cli.app import make_app
from yggdrasil.cli.exit_codes import Ending, ending_of
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import BadLine, Prompt, scan_prompts

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["prompt", "messages", "id", "category", "role", "content"]) | st.text(max_size=5)
turns = st.lists(st.dictionaries(names, values, max_size=3), max_size=3)
records = st.dictionaries(names, values | turns, max_size=4).map(lambda record: json.dumps(record).encode())
lines = records | st.binary(max_size=30) | st.text(max_size=30).map(lambda text: text.encode(errors="surrogatepass"))
FOUND = typer.main.get_command(make_app()).commands
COMMANDS = {name: command for name, command in FOUND.items() if not hasattr(command, "commands")}
quick = examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@quick
@given(st.lists(lines, max_size=5))
def test_any_bytes_are_prompts_or_lines_that_are_named(tmp_path, found):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(found))
    try:
        items, refusal = list(scan_prompts(path)), str(path)
    except YggdrasilError as error:
        items, refusal = [], str(error)
    assert str(path) in refusal
    for item in items:
        assert isinstance(item, Prompt | BadLine)
        place = f"{path}, line {item.place.line}"
        assert str(item.place) == place
        assert isinstance(item, Prompt) or (item.reason.startswith(place) and "\n" not in item.reason)


FITTING = {"to": "llama-server", "out": "new"}  # values of required options that no file's name can have


@quick
@given(data=st.data())
@pytest.mark.parametrize("name", COMMANDS)
def test_any_text_is_an_options_value_or_is_refused_by_name(tmp_path, monkeypatch, name, data):
    """Parsed alone: what is refused later has cases of its own."""
    monkeypatch.chdir(tmp_path)
    command = COMMANDS[name]
    option = data.draw(st.sampled_from([each for each in command.params if each.param_type_name == "option"]))
    numbers = (st.integers() | st.floats()).map(str)
    value = data.draw(numbers | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
    required = [each for each in command.params if each.required and each is not option]
    (tmp_path / "x").touch()
    given = {each: FITTING.get(each.name, "x") for each in required}
    around = [x if each.param_type_name == "argument" else f"{each.opts[0]}={x}" for each, x in given.items()]
    ending = Ending(option.opts[0], 2)
    try:
        command.make_context(name, [*around, f"{option.opts[0]}={value}"]).close()
    except Exception as error:  # noqa: BLE001  (whatever it is, it must have an ending)
        ending = ending_of(error) or Ending(repr(error), 1)

    assert ending.code == 2, ending.sentence
    assert option.opts[0] in (ending.sentence or "")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
