"""Functions are drawn by a seed and shown without their bodies."""

import importlib


def test_a_seed_draws_the_same_functions(monkeypatch, capsys):
    script = importlib.import_module("sample_docstrings")
    monkeypatch.setattr(script, "PACKAGE", script.PACKAGE / "policy")

    def drawn(*arguments):
        monkeypatch.setattr("sys.argv", ["sample_docstrings", *arguments])
        script.main()
        return capsys.readouterr().out

    assert drawn("--seed", "3", "--count", "4") == drawn("--seed", "3", "--count", "4")
    assert drawn("--seed", "3", "--count", "4") != drawn("--seed", "4", "--count", "4")
    assert drawn("--count", "4").count("--- ") == 4


def test_a_body_is_left_out(tmp_path):
    script = importlib.import_module("sample_docstrings")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text(
        'def shown(x: int) -> int:\n    """Add one."""\n    return x + 1\n\ndef bare():\n    pass\n\n'
        'def _private():\n    """Hidden."""\n'
    )

    ((where, text),) = script.functions(tmp_path / "package")

    assert where == "package/a.py:1"
    assert text == 'def shown(x: int) -> int:\n    """Add one."""'
