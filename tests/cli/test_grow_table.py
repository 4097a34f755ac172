"""``--grow-table`` reaches the decoder from every command that has it, and nothing grows without it."""

import importlib
import sys

import pytest

from yggdrasil import pretrained
from yggdrasil.cli import main, opening
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving import running

COMMANDS = {"generate": ("--prompt", "a"), "chat": (), "serve": ()}


@pytest.mark.parametrize("grows", [True, False])
def test_a_decoder_grows_where_it_is_opened_so(monkeypatch, grows):
    class Opened:
        plan, grown = None, 0

        def grow_table(self):
            self.grown += 1

    monkeypatch.setattr(pretrained.Decoder, "from_pretrained", lambda *_, **__: Opened())

    assert opening.open_decoder("a/model", None, force_machine=False, grows_table=grows).grown == int(grows)


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_pass_it_on(monkeypatch, capsys, name, grows):
    asked = []

    def open_decoder(*_, **options):
        asked.append(options["grows_table"])
        raise YggdrasilError("enough was seen")

    monkeypatch.setattr(importlib.import_module(f"yggdrasil.cli.{name}"), "open_decoder", open_decoder)
    monkeypatch.setattr(running, "run_server", lambda opening, *_: opening())
    monkeypatch.setattr(sys, "argv", ["yggdrasil", name, "a/model", *COMMANDS[name], *["--grow-table"] * grows])
    with pytest.raises(SystemExit) as ended:
        main()

    assert asked == [grows]
    assert ended.value.code == 2
    assert "enough was seen" in capsys.readouterr().err
