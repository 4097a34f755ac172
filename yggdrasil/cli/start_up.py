"""Shortens the start of commands that decode: work that needs no Python code runs while PyTorch is imported."""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from yggdrasil.artifacts import parse_json
from yggdrasil.artifacts.memory import reserve, trim_heap
from yggdrasil.artifacts.models import packed_bytes
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.checkpoints.gguf.packing import GgufPacker
    from yggdrasil.checkpoints.source import Source

_LAZY = 1  # RTLD_LAZY
_SHARE = 15 / 16  # share of the weights' bytes in the file that packed weights take at least


def load_torch_libraries() -> None:
    """Begin to load PyTorch's libraries in a thread, which takes a fifth of the time of ``import torch``.

    Nothing happens if PyTorch is imported already, or not on Linux.
    """
    found = find_spec("torch") if sys.platform == "linux" and is_before_torch() else None
    for folder in () if found is None else found.submodule_search_locations or ():
        library = str(Path(folder) / "lib" / "libtorch_cpu.so").encode()
        # The C function: ``ctypes.CDLL`` would hold the GIL. If it fails, so will the import, which says why.
        with suppress(OSError, AttributeError, RuntimeError):
            Thread(target=ctypes.CDLL(None).dlopen, args=(library, _LAZY), daemon=True).start()


def work_ahead(source: str, *, packs: bool) -> Callable[[], None]:
    """Begin in threads to load PyTorch's libraries, to open a model's tokenizer and to prepare for its weights.

    With ``packs``, the weights of a GGUF file are packed, and memory is reserved for the weights of a folder. The
    metadata of a GGUF file that was never read are first read in a forked process, and cached. Call the returned
    function after PyTorch is imported: it waits for the forked process, if any, and then begins the other work.

    Nothing happens if ``source`` is no model on this machine (but a plan or a hub id), or if PyTorch is imported
    already. Errors are not raised here, but by the code that loads the model.
    """
    from yggdrasil.artifacts.gguf import is_gguf
    from yggdrasil.artifacts.homes import expanded
    from yggdrasil.checkpoints.source import begin_reading

    model = expanded(source)
    if not is_before_torch() or not (is_gguf(model) or (model / "config.json").is_file()):
        return lambda: None
    is_begun = False
    with suppress(OSError, YggdrasilError):  # the loader raises what is wrong
        is_begun = is_gguf(model) and begin_reading(model)
        load_torch_libraries()
    if is_begun:
        return lambda: _begin_work(model, packs=packs)
    _begin_work(model, packs=packs)
    return lambda: None


def _begin_work(model: Path, *, packs: bool) -> None:
    """Begin in a thread to open the tokenizer of ``model`` and to prepare for its weights."""
    from yggdrasil.checkpoints.kept_tokenizer import open_ahead
    from yggdrasil.checkpoints.source import Source

    with suppress(OSError, YggdrasilError):
        found = Source.find(model)
        # Parsing a tokenizer takes three times the memory that it keeps: give that back before weights take theirs.
        work: list[Callable[[], object]] = [open_ahead(found.folder), trim_heap]
        if packs and found.gguf is None:
            reserve(int(_SHARE * packed_bytes(model)))
        elif packs and (packer := _packer(found)) is not None:
            work.append(packer.pack_all)
        Thread(target=_do, args=(work,), daemon=True).start()


def _packer(source: "Source") -> "GgufPacker | None":
    """Return the packer of a GGUF file's weights; None if the loader will not pack them from the file."""
    from yggdrasil.artifacts.gguf import read_gguf_layout
    from yggdrasil.checkpoints.gguf.packing import begin_packing
    from yggdrasil.library.build import load_native
    from yggdrasil.runtime.native_steps.families import FAMILIES, with_defaults

    with suppress(ValueError, KeyError, TypeError, AttributeError):
        config = with_defaults(parse_json((source.folder / "config.json").read_bytes()))
        if source.gguf and config is not None and FAMILIES[config["model_type"]].is_mapped and load_native():
            heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
            return begin_packing(read_gguf_layout(source.gguf), heads)
    return None


def _do(work: "Sequence[Callable[[], object]]") -> None:
    for each in work:
        with suppress(OSError, RuntimeError):  # whoever needs the result does it again, and raises
            each()


def is_before_torch() -> bool:
    """Return whether PyTorch has not been imported in this process yet, so that its import can still be made faster."""
    return "torch" not in sys.modules


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off within the block, because it would slow the import of PyTorch down.

    Objects that exist at the end of the block are also exempt from later collections. Nothing happens if PyTorch is
    imported already.
    """
    if not is_before_torch():
        yield
        return
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
