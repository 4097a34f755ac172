"""The whole program, run in this process."""

import sys

import pytest

from yggdrasil.cli import main


@pytest.fixture
def program(monkeypatch, capsys):
    """Run ``yggdrasil`` with arguments; returns (exit code, stdout, stderr), which shows no traceback."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["yggdrasil", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return ended.value.code, output.out, output.err

    return run
