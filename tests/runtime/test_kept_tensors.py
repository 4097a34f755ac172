"""Kept tensors are those that loading gives, to the last bit; what is damaged or of another model is loaded anew."""

import ast
import re
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from tiny import tiny_model

from yggdrasil.checkpoints import prepared
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.runtime import kept_tensors, loading
from yggdrasil.runtime.kept_tensors import keep_model, open_model

CPU = torch.device("cpu")
WEIGHTS = "q8_0"
pytestmark = pytest.mark.skipif(not is_native(), reason="no native kernels here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def loads(monkeypatch):
    """How often a model was loaded."""
    calls = []
    monkeypatch.setattr(kept_tensors, "in_fork", lambda work: work())  # where it can be counted
    load_model = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *args, **options: calls.append(1) or load_model(*args, **options))
    return calls


def saved(folder, family="llama"):
    tiny_model(family).save_pretrained(folder)
    return folder


def opened(folder, weights=WEIGHTS, dtype=torch.float32):
    return open_model(folder, dtype, CPU, 1, weights=weights)


@pytest.mark.parametrize(
    ("family", "weights", "dtype"),
    [("gemma3", "q4_0", torch.bfloat16), ("qwen2", "q8_0", torch.float32)],  # tied; with biases
)
def test_a_second_start_reads_what_the_first_one_packed(tmp_path, cache, loads, family, weights, dtype):
    folder = saved(tmp_path / "model", family)
    first = loading.load_model(folder, dtype, CPU, 1, weights=weights)
    second = [opened(folder, weights, dtype) for _ in range(2)][1]

    assert len(loads) == 2, "here, and the first time that it was opened"
    assert list(second.tensors) == list(first.tensors)
    for name, tensor in first.tensors.items():
        again = second.tensors[name]
        assert (again.shape, again.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(again, tensor), name
    assert (second.formats, second.described, second.dtype) == (first.formats, first.described, first.dtype)
    assert second.max_context == first.max_context
    assert list(second.model.state_dict()) == list(first.model.state_dict()), "it is loaded when it is to be traced"
    assert len(loads) == 3


def test_loading_leaves_nothing_of_the_model_s_code_behind(tmp_path, cache):
    """It is done in a process of its own, so that a first start holds no more than a second one."""
    loaded = opened(saved(tmp_path / "model"))

    assert "model" not in vars(loaded)
    assert set(loaded.model.state_dict()) <= set(loaded.tensors)


def test_a_model_that_is_loaded_already_is_kept_without_loading_it_again(tmp_path, cache, loads):
    folder = saved(tmp_path / "model")
    loaded = loading.load_model(folder, torch.float32, CPU, 1, weights=WEIGHTS)
    keep_model(loaded, folder, WEIGHTS)
    again = opened(folder)

    assert len(loads) == 1
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in loaded.tensors.items())


@pytest.mark.parametrize(("family", "weights"), [("gpt2", WEIGHTS), ("gpt2", "full"), ("llama", "full")])
def test_what_is_traced_or_read_from_its_file_is_not_kept(tmp_path, cache, family, weights):
    folder = saved(tmp_path / "model", family)
    loaded = opened(folder, weights)
    keep_model(loaded, folder, weights)

    assert not list(cache.rglob("tensors.safetensors"))


def test_a_bit_between_the_samples_is_missed(tmp_path, cache, loads, monkeypatch):
    """Of a large file only samples are looked at before it is read: what is read tells."""
    monkeypatch.setattr(prepared, "_NUM_SAMPLES", 1)
    monkeypatch.setattr(prepared, "_SAMPLE_BYTES", 64)
    monkeypatch.setattr(prepared, "_HEAD_BYTES", 64)
    folder = saved(tmp_path / "model")
    first = opened(folder)
    (kept,) = cache.rglob("tensors.safetensors")
    content = bytearray(kept.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    kept.write_bytes(content)
    assert prepared.is_whole(kept.parent, kept_tensors._layout(), kept.name)

    again = opened(folder)

    assert len(loads) == 2
    for name, tensor in first.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name


def test_of_two_that_prepare_at_once_the_second_takes_what_the_first_made(tmp_path, monkeypatch):
    """It put its own in that place, from under whoever had begun to read there, or found the place taken and failed."""
    kept, waits = tmp_path / "kept", Event()
    monkeypatch.setattr(prepared, "tell", lambda _: waits.set())
    second = Thread(target=prepared.prepare, args=(kept, 1, lambda partial: (partial / "file").write_text("second")))

    def write(partial):
        second.start()
        assert waits.wait(60)
        (partial / "file").write_text("first")

    prepared.prepare(kept, 1, write)
    second.join()

    assert (kept / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [kept]


def test_all_of_the_beginning_is_looked_at(tmp_path):
    """Where a large file says which tensors it holds, and what the model is: nobody looks at that again."""
    prepared.prepare(tmp_path / "kept", 1, lambda partial: (partial / "file").write_bytes(bytes(2**24)), sampled="file")
    file = tmp_path / "kept" / "file"
    for place in (70_000, 200_000, 900_000):
        content = bytearray(2**24)
        content[place] = 1
        file.write_bytes(content)
        assert not prepared.is_whole(tmp_path / "kept", 1, sampled="file"), place


def test_every_byte_of_what_is_not_checked_again_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_SMALL_BYTES", 100)
    for name in ("small", "large"):
        prepared.prepare(tmp_path / name, 1, lambda partial, name=name: (partial / "file").write_bytes(
            bytes(100 if name == "small" else 1000)))  # fmt: skip
        file = tmp_path / name / "file"
        content = file.read_bytes()
        for place in range(0, len(content), 7):
            file.write_bytes(content[:place] + b"x" + content[place + 1 :])
            assert not prepared.is_whole(tmp_path / name, 1)
        file.write_bytes(content)
        assert prepared.is_whole(tmp_path / name, 1)


def test_what_is_damaged_or_of_other_kernels_is_made_again(tmp_path, cache, loads, monkeypatch):
    folder = saved(tmp_path / "model")
    expected = opened(folder).tensors["model.norm.weight"]
    (kept,) = cache.rglob("tensors.safetensors")
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    assert torch.equal(opened(folder).tensors["model.norm.weight"], expected)
    monkeypatch.setattr(kept_tensors, "_layout", lambda: "another")
    opened(folder)
    opened(folder)
    assert len(loads) == 3


@pytest.mark.parametrize("left", ["all", "half", "nothing"])
def test_what_another_version_puts_there_meanwhile_is_not_taken(tmp_path, cache, loads, monkeypatch, left):
    """It was looked at and found whole; then its place was taken."""
    folder = saved(tmp_path / "model")
    with monkeypatch.context() as other:
        other.setattr(kept_tensors, "_layout", lambda: "another")
        opened(folder)
    (kept,) = cache.rglob("tensors.safetensors")
    if left == "half":
        kept.write_bytes(kept.read_bytes()[:20])
    if left == "nothing":
        kept.unlink()
    monkeypatch.setattr(kept_tensors, "is_whole", lambda *_, **__: True)
    first, second = opened(folder), opened(folder)

    assert len(loads) == 2, "once by the other version"
    assert all(torch.equal(second.tensors[name], tensor) for name, tensor in first.tensors.items())


def test_another_checkpoint_in_the_same_place_is_another_model(tmp_path, cache, loads):
    opened(saved(tmp_path / "model"))
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(tmp_path / "model")

    assert torch.equal(opened(tmp_path / "model").tensors["model.norm.weight"], model.model.norm.weight)
    assert len(loads) == 2


def test_what_was_kept_saves_no_model_that_is_gone_or_cut_off(tmp_path, cache):
    folder = saved(tmp_path / "model")
    opened(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])

    with pytest.raises(YggdrasilError, match="is truncated"):
        opened(folder)
    (folder / "config.json").unlink()
    with pytest.raises(YggdrasilError, match=r"holds no config\.json"):
        opened(folder)


def test_a_full_disk_or_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, cache, loads, monkeypatch):
    folder = saved(tmp_path / "model")
    cache.write_text("a file in the place of the folder")
    opened(folder)
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(kept_tensors, "_has_room", lambda _: False)
    opened(folder)

    assert len(loads) == 4, "to keep it, and to have it"
    assert not (tmp_path / "other").exists()


# What these say of a model is part of the key by itself, or is in no tensor.
NOT_IN_TENSORS = {
    "native/arena.py", "runtime/attention.py", "native/__init__.py", "runtime/loaded.py", "runtime/memory_limits.py",
    "runtime/states/operators.py",
}  # fmt: skip


def test_whatever_reads_packs_or_rounds_tensors_makes_kept_ones_out_of_date():
    package = Path(kept_tensors.__file__).parents[1]
    counted = {path.relative_to(package).as_posix() for each in kept_tensors._SOURCES for path in package.glob(each)}
    used = set()
    for file in ("runtime/loading.py", "checkpoints/packing.py", "checkpoints/gguf/rows.py"):
        for node in ast.walk(ast.parse((package / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(
                r"yggdrasil\.(checkpoints|compiler|native|runtime)\b", node.module or ""
            ):
                name = node.module.removeprefix("yggdrasil.").replace(".", "/")
                used.add(f"{name}.py" if (package / f"{name}.py").is_file() else f"{name}/__init__.py")

    assert "checkpoints/gguf/rows.py" in used
    assert used - counted <= NOT_IN_TENSORS
