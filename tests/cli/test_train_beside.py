"""``--train`` reaches the decoder from ``chat`` and ``serve``, and a folder that cannot be written is refused first."""

import importlib
import sys
from pathlib import Path

import pytest

from yggdrasil.cli import main
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving import process


@pytest.mark.parametrize("name", ["chat", "serve"])
def test_commands_pass_it_on(monkeypatch, capsys, tmp_path, name):
    calls, command = [], importlib.import_module(f"yggdrasil.cli.{name}")

    def train_beside(decoder, out):
        calls.append((decoder, out))
        raise YggdrasilError("enough was seen")

    monkeypatch.setattr(command, "open_decoder", lambda *_, **__: "a decoder")
    monkeypatch.setattr(command, "train_beside", train_beside)
    monkeypatch.setattr(process, "run_server", lambda opening, *_: opening())
    monkeypatch.setattr(sys, "argv", ["yggdrasil", name, "a/model", "--train", str(tmp_path / "head")])
    with pytest.raises(SystemExit):
        main()

    assert calls == [("a decoder", Path(tmp_path / "head"))]
    assert "enough was seen" in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["yggdrasil", name, "a/model", "--train", str(tmp_path / "file" / "head")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--train" in capsys.readouterr().err
    assert len(calls) == 1
