"""``--grow-table`` reaches the decoder from every command that has it; without it nothing grows in ``serve``."""

import importlib

import pytest

from yggdrasil import pretrained
from yggdrasil.cli import open_decoder as opening
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving import process

COMMANDS = {"generate": ("--prompt", "a"), "chat": (), "serve": ()}


@pytest.mark.parametrize(
    ("grows", "has_table", "expected"), [(True, False, 1), (False, True, 0), (None, True, 1), (None, False, 0)]
)
def test_a_decoder_grows_where_it_is_opened_so(monkeypatch, grows, has_table, expected):
    class Opened:
        plan, grown = None, 0

        def grow_table(self):
            self.grown += 1

    Opened.has_table = has_table

    monkeypatch.setattr(pretrained.Decoder, "from_pretrained", lambda *_, **__: Opened())

    assert opening.open_decoder("a/model", None, force_machine=False, grow_table=grows).grown == expected


@pytest.mark.parametrize("grows", [True, False, None])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_pass_it_on(monkeypatch, program, name, grows):
    options_seen = []

    def open_decoder(*_, **options):
        options_seen.append(options["grow_table"])
        raise YggdrasilError("enough was seen")

    monkeypatch.setattr(importlib.import_module(f"yggdrasil.cli.{name}"), "open_decoder", open_decoder)
    monkeypatch.setattr(process, "run_server", lambda opening, *_: opening())
    option = () if grows is None else (f"--{'' if grows else 'no-'}grow-table",)
    code, _, err = program(name, "a/model", *COMMANDS[name], *option)

    assert options_seen == [False if grows is None and name == "serve" else grows]
    assert code == 2
    assert "enough was seen" in err
