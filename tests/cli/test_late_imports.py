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
expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
with torch.random.fork_rng():
    assert torch.equal(torch.manual_seed(3) and torch.rand(2), expected)
assert "activate_meta" not in vars(shapes), "executed by a generator"
assert torch.nn.quantized.Linear is not None
assert torch.ao.quantization.default_qconfig is not None
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
assert "activate_meta" not in vars(shapes), "executed by another late module"
import torch._dynamo
assert "activate_meta" in vars(shapes), "not executed for the compiler"
assert torch.equal(torch.rand(2, generator=torch.Generator().manual_seed(3)), expected)
assert torch.compile(lambda x: torch.linalg.cholesky(x @ x.T), backend="aot_eager")(torch.eye(3)).sum() == 3
layer = torch.nn.Linear(2, 2)
program = torch.export.export(layer, (torch.ones(1, 2),))
assert torch.equal(program.module()(torch.ones(1, 2)), layer(torch.ones(1, 2)))
"""


_LATER_SCRIPT = """
from yggdrasil.cli.late_imports import import_late

import_late()
import sys
import torch

late = ("torch.export", "torch.nested", "torch.optim", "torch.profiler", "torch.utils.data",
        "torchgen.model", "torch.distributed._meta_registrations", "unittest.mock")
assert all("__yggdrasil_loader__" in vars(sys.modules[name]) for name in late), "executed with PyTorch"
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert len(list(torch.utils.data.DataLoader([1, 2]))) == 2
assert torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]).is_nested
with torch.profiler.profile() as profile:
    torch.ones(2) + 1
assert profile.key_averages()
import unittest.mock
assert unittest.mock.Mock(return_value=3)() == 3
"""

_PARTS_SCRIPT = """
from yggdrasil.cli.late_imports import import_late

import_late()
import sys
import torch

from torch.profiler.profiler import _KinetoProfile
import torch.utils.data.dataloader
import torch.optim.lr_scheduler
import torch.export.dynamic_shapes
import torch.nested._internal.nested_tensor
assert torch.profiler._KinetoProfile is _KinetoProfile is sys.modules["torch.profiler.profiler"]._KinetoProfile
assert torch.utils.data.DataLoader is torch.utils.data.dataloader.DataLoader
assert torch.optim.lr_scheduler.LambdaLR.__module__ in sys.modules
assert torch.export.Dim is torch.export.dynamic_shapes.Dim
part = torch.utils.data.dataloader
assert part.__spec__.origin == part.__file__ and part.__spec__.loader is part.__loader__
"""

_SOURCE_SCRIPT = """
import sys
from yggdrasil.cli.late_imports import import_late

import_late()
import torch
from torch._library import simple_registry

with torch.library._scoped_library("sample", "DEF") as library:
    library.define("twice(Tensor x) -> Tensor")
    torch.library.register_fake("sample::twice", lambda x: x, lib=library)
    print(simple_registry.singleton.find("sample::twice").fake_impl.kernels[-1].source)
    assert torch.ops.sample.twice(torch.ones(1, device="meta")).shape == (1,)
"""


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another PyTorch")
def test_a_part_of_a_late_package_is_imported_with_its_package_and_once() -> None:
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", _PARTS_SCRIPT], check=True)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another PyTorch")
def test_modules_that_are_late_in_newer_versions_work_when_used() -> None:
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", _LATER_SCRIPT], check=True)


@pytest.mark.skipif(not torch.__version__.startswith(tuple(late_imports._TESTED)), reason="another PyTorch")
def test_operators_are_registered_with_the_source_of_their_caller(tmp_path) -> None:
    file = tmp_path / "script.py"
    file.write_text(_SOURCE_SCRIPT)
    done = subprocess.run([sys.executable, file], check=True, capture_output=True, text=True)

    assert done.stdout == f"{file}:11\n"


@pytest.mark.skipif(not torch.__version__.startswith(tuple(late_imports._TESTED)), reason="another PyTorch")
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
