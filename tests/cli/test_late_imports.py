"""PyTorch's late modules are executed at their first use, and before a module that needs what they register."""

import subprocess
import sys

import pytest
import torch

from yggdrasil.cli import late_imports

_SCRIPT = """
from yggdrasil.cli.late_imports import import_late

import_late()
import sys
import torch

shapes = sys.modules["torch._meta_registrations"]
assert "activate_meta" not in vars(shapes), "executed with PyTorch"
assert torch.nn.quantized.Linear is not None
assert torch.ao.quantization.default_qconfig is not None
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
assert "activate_meta" not in vars(shapes), "executed by another late module"
import torch._dynamo
assert "activate_meta" in vars(shapes), "not executed for the compiler"
assert torch.compile(lambda x: torch.linalg.cholesky(x @ x.T), backend="aot_eager")(torch.eye(3)).sum() == 3
"""


@pytest.mark.skipif(not torch.__version__.startswith(late_imports._TESTED), reason="another PyTorch")
def test_late_modules_are_executed_when_they_are_needed() -> None:
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", _SCRIPT], check=True)


@pytest.mark.parametrize(
    ("version", "is_late"), [("2.13.1+cpu", True), ("2.12.0+cu130", True), ("2.11.0+cu130", False), (None, False)]
)
def test_only_tested_versions_are_imported_late(tmp_path, monkeypatch, version, is_late):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    if version is not None:
        (tmp_path / "torch" / "version.py").write_text(f"__all__ = []\n__version__ = '{version}'\n")
    monkeypatch.syspath_prepend(tmp_path)
    others = [finder for finder in sys.meta_path if not isinstance(finder, late_imports._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    late_imports.import_late()

    assert isinstance(sys.meta_path[0], late_imports._Finder) == is_late
