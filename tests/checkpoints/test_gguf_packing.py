"""Matrices of a GGUF file are packed once, by a thread or by whoever needs them, and without PyTorch."""

import subprocess
import sys
from threading import Thread
from time import sleep

import numpy as np
import pytest
import torch
from gguf_files import Kind, tiny_model, write_gguf
from tiny_pair import byte_tokenizer

from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.checkpoints import source
from yggdrasil.checkpoints.formats.kinds import Format
from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.checkpoints.gguf import packing
from yggdrasil.checkpoints.source import Source, begin_reading
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena

pytestmark = pytest.mark.skipif(not is_native(), reason="packed by the native library")
HEADS = (4, 2)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that was never read."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_root() / "kernels")
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, intermediate_size=128)
    return write_gguf(tmp_path / "model.gguf", model, kind=Kind.Q8_0)


def bytes_of(packed):
    return np.frombuffer(packed.region, np.uint8, packed.pairs * packed.pair_bytes, packed.begin)


def test_parts_of_a_matrix_and_rows_in_the_models_order_are_packed_as_the_whole(file, monkeypatch):
    monkeypatch.setattr(packing, "_PART_BYTES", 1)
    header = read_gguf_header(file)
    packer = packing.GgufPacker(header, HEADS)
    num_ordered = 0
    for place in header.tensors.values():
        packed = packer.packed(place)
        if place.kind != Kind.Q8_0:
            assert packed is None
            continue
        rows = np.fromfile(file, np.uint8, place.num_bytes, offset=place.start).reshape(place.shape[0], -1)
        order = packer.order(place)
        if order is not None:
            num_ordered += 1
            rows = rows[order]
            assert not np.array_equal(order, np.arange(len(order)))
        expected = QuantisedRows(Format.Q8_0, torch.from_numpy(rows)).pack(Arena()).packed.numpy()
        assert np.array_equal(bytes_of(packed), expected.reshape(-1)), place.name
    assert num_ordered == 4  # queries and keys of two layers


def test_a_thread_and_the_loader_pack_each_matrix_once(file, monkeypatch):
    packed, pack = [], packing.GgufPacker._pack
    monkeypatch.setattr(
        packing.GgufPacker, "_pack", lambda self, place, at: packed.append(place) or pack(self, place, at)
    )
    header = read_gguf_header(file)
    packer = packing.begin_packing(header, HEADS)
    thread = Thread(target=packer.pack_all)
    thread.start()
    link = file.with_name("link.gguf")
    link.symlink_to(file)  # a plan names the file that a link points at
    assert packing.packer_of(read_gguf_header(link), HEADS) is packer
    for place in header.tensors.values():
        packer.packed(place)
    thread.join()

    quantised = [name for name, place in header.tensors.items() if place.kind == Kind.Q8_0]
    assert sorted(place.name for place in packed) == sorted(quantised)
    assert packing.packer_of(header, HEADS) is not packer  # it was taken


def test_a_packer_that_nobody_takes_is_stopped(file):
    packer = packing.begin_packing(read_gguf_header(file), HEADS)
    packing.drop_begun()
    packer.pack_all()

    assert all(make._make is not None for make in packer._matrices.values())


@pytest.mark.parametrize("was_read", [False, True], ids=["never read", "read before"])
def test_a_command_opens_the_tokenizer_and_packs_before_it_imports_pytorch(file, was_read):
    """What parsing the tokenizer took is given back before a matrix is packed: both at once would be the peak."""
    if was_read:
        Source.find(file)
    code = (
        "import sys, time\n"
        "from yggdrasil.checkpoints import kept_tokenizer\n"
        "from yggdrasil.checkpoints.gguf import packing\n"
        "from yggdrasil.cli import start_up\n"
        "start_up.load_torch_libraries = lambda: None\n"
        "matrices = lambda: next(iter(packing._begun.values()))._matrices.values()\n"
        "start_up.trim_heap = lambda: print(all(each._make for each in matrices()), flush=True)\n"
        f"go_on = start_up.work_ahead({str(file)!r}, packs=True)\n"
        f"assert bool(packing._begun) == {was_read}\n"
        "go_on()\n"
        "(packer,), (tokenizer,) = packing._begun.values(), kept_tokenizer._ahead.values()\n"
        "while any(each._make for each in (*packer._matrices.values(), tokenizer)):\n"
        "    time.sleep(0.01)\n"
        "print(len(tokenizer()), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    assert done.stdout.split() == ["True", str(len(byte_tokenizer().get_vocab()) + 1), "False"], done.stderr


def test_a_file_that_was_never_read_is_read_in_a_fork_while_this_process_goes_on(file, capfd, monkeypatch):
    begun, write = file.with_name("begun"), source._write_facts

    def write_later(*arguments):
        while not begun.exists():
            sleep(0.01)
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(source, "_write_facts", write_later)
        assert begin_reading(file)
    assert not begin_reading(file)  # it is being read
    begun.touch()
    monkeypatch.setattr(source, "_begin_preparing", lambda *_: pytest.fail("read again"))

    assert (Source.find(file).folder / "config.json").is_file()
    assert capfd.readouterr().err.count("reading") == 1
    assert not begin_reading(file)


def test_a_damaged_file_is_refused_by_who_waits_for_its_fork(tmp_path):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    begin_reading(file)
    for _ in range(2):
        with pytest.raises(YggdrasilError):
            Source.find(file)
