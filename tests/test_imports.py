"""Planning is light, and imports go one way between the rooms."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import yggdrasil

PACKAGE = Path(yggdrasil.__file__).parent
# From low to high: a package may import itself and those before it.
PACKAGES = (
    "errors", "artifacts", "library", "native", "checkpoints", "compiler", "runtime", "tree", "predictor",
    "policy", "acceptance", "drafters", "profiling", "scheduling", "engine",
    "calibration", "training", "export", "in_transformers", "pretrained", "serving", "reports", "bench", "cli",
    "__main__",
)  # fmt: skip
# What these single files may import.
LEAVES = {
    "errors": set(),
    "arguments": {"errors"},
    "own_class": {"errors"},
    "prompts": {"errors", "arguments", "checkpoints"},
}
# Packages that are blocked, and what is imported all the same, each module as the first.
WITHOUT = {
    ("torch", "transformers"): (
        "yggdrasil", "yggdrasil.artifacts", "yggdrasil.prompts", "yggdrasil.scheduling.stages",
        "yggdrasil.scheduling.plan", "yggdrasil.scheduling.timeline", "yggdrasil.scheduling.search",
        "yggdrasil.policy.policy", "yggdrasil.policy.fixed", "yggdrasil.profiling.tally",
        "yggdrasil.checkpoints.gguf.packing", "yggdrasil.checkpoints.source",
    ),
    ("torch", "sklearn", "scipy", "pandas"): (
        "yggdrasil.policy.policy", "yggdrasil.predictor.training", "yggdrasil.profiling.tally",
    ),
    ("torch", "transformers", "pandas", "safetensors", "numpy"): ("yggdrasil.artifacts", "yggdrasil.errors"),
    ("transformers",): ("yggdrasil.reports.page",),
}  # fmt: skip
PROGRAM = """
import sys
from importlib import import_module

sys.modules.update(dict.fromkeys({blocked}))
for module in {modules}:
    import_module(module)
    for name in [name for name in sys.modules if name.startswith("yggdrasil")]:
        del sys.modules[name]
"""


@pytest.mark.parametrize("blocked", WITHOUT, ids=" ".join)
def test_light_modules_need_no_heavy_packages(blocked):
    """A blocked package raises ImportError when it is asked for."""
    program = PROGRAM.format(blocked=blocked, modules=WITHOUT[blocked])

    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)


def test_imports_go_one_way():
    violations = [
        f"{path.relative_to(PACKAGE)} imports {imported}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for imported in sorted(imports_of(path))
        if not is_allowed(room_of(path), imported)
    ]

    assert violations == []


def test_every_room_has_its_place():
    found = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}

    assert found <= {*PACKAGES, *LEAVES}


def test_the_table_of_packages_has_the_order_of_the_rooms():
    text = (PACKAGE.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `yggdrasil/(\w+)` \|", text, re.MULTILINE)

    assert [folder for folder in reversed(listed) if folder in PACKAGES] == [
        folder for folder in PACKAGES if folder in listed
    ]
    assert len(listed) > 20


def test_an_upward_import_would_be_seen(tmp_path):
    """Also inside a function, under TYPE_CHECKING, and from the package itself."""
    path = tmp_path / "module.py"
    path.write_text(
        "def f():\n    from yggdrasil.engine.engine import Engine\n"
        "if TYPE_CHECKING:\n    import yggdrasil.cli.app as app\n"
        "from yggdrasil import bench\n"
    )

    assert imports_of(path) == {"engine", "cli", "bench"}
    assert not is_allowed("tree", "engine")
    assert not is_allowed("prompts", "tree")
    assert is_allowed("engine", "tree")


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    """The rooms that a file imports, wherever in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "yggdrasil":
            names = [f"yggdrasil.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("yggdrasil.")}
    return rooms


def is_allowed(folder, imported):
    if folder == "__init__":  # the public face, lazily
        return True
    if folder in LEAVES:
        return imported in LEAVES[folder]
    if imported in LEAVES:
        return True
    return imported in PACKAGES and PACKAGES.index(imported) <= PACKAGES.index(folder)
