"""Packages and kernel libraries on disk: what is damaged does not count as there."""

import ast
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import yggdrasil
from yggdrasil.compiler import compiled, packages
from yggdrasil.compiler.compiled import _TRACED_SOURCES, StepKey, ensure_compiled, package_path
from yggdrasil.compiler.packages import (
    compiling,
    is_whole,
    manifest_path,
    new_package,
    open_package,
    package_folder,
    read_manifest,
    unit_path,
)
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.native.build import _is_whole
from yggdrasil.native.compiling import digest_file, digest_of


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that calls a unit."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    with new_package(unit_path("layers-1")) as place:
        place.write_bytes(b"unit")
    path = package_folder() / "step.pt2"
    with new_package(path, ["layers-1"], [0, 2]) as place:
        place.write_bytes(b"step")
    return path


def test_a_package_is_whole_with_all_that_it_calls(package):
    assert is_whole(package)
    assert read_manifest(package)[1:] == (("layers-1",), (0, 2))
    assert sorted(path.suffix for path in package.parent.iterdir()) == [".json", ".json", ".pt2", ".pt2"]


@pytest.mark.parametrize("content", [b"", b"stop", b"step and more"], ids=["empty", "changed", "longer"])
@pytest.mark.parametrize("what", ["step", "layers-1"])
def test_a_damaged_package_is_removed_and_named(package, capsys, what, content):
    path = package.with_name(f"{what}.pt2")
    path.write_bytes(content)

    assert not is_whole(package)
    assert f"{path} is damaged and is compiled again" in capsys.readouterr().err
    assert not path.exists()
    assert not manifest_path(path).exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"digest": 1, "units": 2, "inputs": []}'])
def test_a_damaged_manifest_counts_as_a_damaged_package(package, content):
    manifest_path(package).write_bytes(content)

    assert not is_whole(package)
    assert not package.exists()


@pytest.mark.parametrize("change", [("inputs", [2, 0]), ("inputs", None), ("units", [])])
def test_a_manifest_that_says_something_else_is_damaged(package, change):
    path = manifest_path(package)
    path.write_text(json.dumps({**json.loads(path.read_text()), change[0]: change[1]}))

    assert not is_whole(package)
    assert not package.exists()


def test_a_package_that_pytorch_cannot_load_is_removed_and_said(package):
    """It is as it was written: whoever wrote it packed a file that was not finished."""
    path = package.with_name("other.pt2")
    with new_package(path) as place:
        place.write_bytes(b"no archive")

    with pytest.raises(YggdrasilError, match=r"other.pt2 cannot be loaded .* run the same command again"):
        open_package(path)
    assert not path.exists()
    assert not manifest_path(path).exists()


def test_a_unit_that_pytorch_cannot_load_is_removed_and_said(package):
    if not is_native():
        pytest.skip("only the compiled kernels open units")

    with pytest.raises(YggdrasilError, match=r"layers-1.pt2 cannot be loaded .* run the same command again"):
        open_package(package)
    assert not unit_path("layers-1").exists()
    assert package.exists()


@pytest.mark.parametrize("reason", ["No such file or directory", "mounted noexec"])
@pytest.mark.parametrize("units", [[], ["layers-1"]])
def test_an_unusable_temporary_folder_is_named_and_packages_stay(package, tmp_path, monkeypatch, units, reason):
    """PyTorch unpacks packages there: compiled anew, they would meet the same fate."""
    path, temporary = package.with_name("other.pt2"), tmp_path / "temporary"
    if units and not is_native():
        pytest.skip("only the compiled kernels open units")
    with new_package(path, units) as place:
        place.write_bytes(b"no archive")
    monkeypatch.setenv("TMPDIR", str(temporary))
    if reason == "mounted noexec":
        temporary.mkdir()
        mounted, statvfs = SimpleNamespace(f_flag=os.ST_NOEXEC), os.statvfs
        monkeypatch.setattr(os, "statvfs", lambda path: mounted if path == temporary else statvfs(path))

    with pytest.raises(YggdrasilError, match=rf"cannot be unpacked in .* {temporary} \({reason}\); .* TMPDIR"):
        open_package(path)
    assert is_whole(path)


def test_what_another_compiles_meanwhile_is_not_compiled_again(package, tmp_path, monkeypatch):
    """Nor at the same time: its files are the same ones."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    path, turns, told, waits = package.with_name("other.pt2"), [], [], threading.Event()
    monkeypatch.setattr(packages, "tell", lambda sentence: (told.append(sentence), waits.set()))

    def compile_too():
        with compiling(path) as is_missing:
            turns.append(is_missing)

    other = threading.Thread(target=compile_too)
    with compiling(path) as is_missing:
        turns.append(is_missing)
        other.start()
        assert waits.wait(60)
        assert turns == [True]
        with new_package(path) as place:
            place.write_bytes(b"other")
    other.join()

    assert turns == [True, False]
    assert len(told) == 1
    assert "waiting for its end" in told[0]


def test_what_is_missing_is_compiled_in_its_turn_and_what_is_there_is_not(package, monkeypatch):
    """The turn tells: whoever compiled meanwhile may have made it."""
    turns, compiled_keys = [True, False], []

    @contextmanager
    def turn(path):
        compiled_keys.append(path.name)
        yield turns.pop(0)

    monkeypatch.setattr(compiled, "compiling", turn)
    monkeypatch.setattr(compiled, "compile_package", lambda *given, fuse: compiled_keys.append(given[2]))
    prepared = []
    key, there = StepKey("plain", 1, "", ""), StepKey("verify", 8, "", "")
    with new_package(package_path(there)) as place:
        place.write_bytes(b"step")

    def ensure(each):
        return ensure_compiled(torch.nn.Identity(), [], each, prepare=lambda: prepared.append(len(turns)))

    assert [ensure(each) for each in (key, key, there)] == [True, False, False]
    assert prepared == [1], "what tracing needs is made when it is traced"
    assert compiled_keys == [key.file_name(), key, key.file_name()]


def test_a_package_that_is_replaced_while_it_is_looked_at_stays(package, monkeypatch):
    """What was read before told of another one."""
    digest, looks = packages.file_digest, []

    def late(path):
        looks.append(path)
        if len(looks) == 1:
            monkeypatch.setattr(packages, "file_digest", digest)
            with new_package(package, [], [1]) as place:
                place.write_bytes(b"another")
        return digest(path)

    monkeypatch.setattr(packages, "file_digest", late)
    assert read_manifest(package).inputs == (1,)
    assert package.read_bytes() == b"another"


def test_a_package_whose_manifest_is_about_to_come_stays(package, monkeypatch):
    """The manifest of the one before would tell that it is damaged."""
    write, seen = packages.write_atomic, []

    def late(path, data):
        seen.append(read_manifest(package))
        write(path, data)

    monkeypatch.setattr(packages, "write_atomic", late)
    with new_package(package, [], [1]) as place:
        place.write_bytes(b"another")

    assert seen == [None]
    assert read_manifest(package).inputs == (1,)


@pytest.mark.parametrize("half", ["package", "manifest"])
def test_half_of_a_pair_does_not_count_and_stays_for_whoever_writes_the_other(package, half):
    """Removed, it would be missing where another process has just written it and writes its manifest now."""
    there = {package, manifest_path(package)}
    gone = package if half == "package" else manifest_path(package)
    gone.unlink()

    assert not is_whole(package)
    assert {path for path in there if path.exists()} == there - {gone}
    with new_package(package, ["layers-1"]) as place:
        place.write_bytes(b"anew")
    assert is_whole(package)


def test_a_package_that_fails_leaves_nothing(package):
    def fail():
        with new_package(package.with_name("other.pt2")) as place:
            place.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert not list(package.parent.glob("other*"))
    assert len(list(package.parent.iterdir())) == 4


def test_a_kernel_library_that_was_cut_short_is_not_loaded(tmp_path, capsys):
    library = tmp_path / "ops.so"
    library.write_bytes(b"0123456789")
    assert not _is_whole(library)  # of a version that wrote no digest

    digest_file(library).write_bytes(digest_of(library))
    assert _is_whole(library)
    library.write_bytes(b"01234")
    assert not _is_whole(library)
    assert "is damaged and is compiled again" in capsys.readouterr().err


FULL = """
import resource, sys, torch, torch._inductor.package.package
from pathlib import Path
from types import SimpleNamespace
from yggdrasil.errors import YggdrasilError
from yggdrasil.compiler.compiled import _write_package

source = Path(sys.argv[1], "model.cpp")
source.write_text("x" * 10_000)
torch._inductor.aot_compile = lambda *arguments, **options: [str(source)]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    _write_package(SimpleNamespace(module=None, examples=[]), Path(sys.argv[1], "steps", "step.pt2"))
except YggdrasilError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
def test_where_a_package_has_no_room_a_sentence_says_so(tmp_path):
    """PyTorch's writer of archives ends its process, with a signal."""
    ended = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"cannot compile to {tmp_path / 'steps'} (File too large)")
    assert list((tmp_path / "steps").iterdir()) == []


def test_a_change_of_any_module_that_is_traced_makes_new_packages():
    """By their text, all classes that are PyTorch modules, through however many bases, and do more than hold parts."""
    root = Path(yggdrasil.__file__).parent
    classes = {}  # name -> its bases, its file, its methods
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                classes[node.name] = bases, file.relative_to(root).as_posix(), methods - {"__init__"}
    modules = {"Module"}
    while found := {name for name, (bases, *_) in classes.items() if bases & modules} - modules:
        modules |= found
    files = {file for name, (_, file, methods) in classes.items() if name in modules and methods}
    assert len(files) > 10
    assert files <= set(_TRACED_SOURCES)
    assert all((root / source).is_file() for source in _TRACED_SOURCES)
