"""PyTorch's late modules are executed at their first use, and before a module that needs what they register."""

import subprocess
import sys

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


def test_late_modules_are_executed_when_they_are_needed() -> None:
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", _SCRIPT], check=True)
