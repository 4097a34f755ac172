"""Shortens the start of commands that decode: work that needs no Python code runs beside the import of PyTorch."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from yggdrasil.errors import YggdrasilError

_LAZY = 1  # RTLD_LAZY
_SHARE = 15 / 16  # of the weights' bytes in the file; packed weights take at least so many


def load_torch_libraries() -> None:
    """Begin to load PyTorch's libraries in a thread, a fifth of the time of its import; Linux only.

    Does nothing if PyTorch is imported already.
    """
    found = find_spec("torch") if sys.platform == "linux" and is_before_torch() else None
    for folder in () if found is None else found.submodule_search_locations or ():
        library = str(Path(folder) / "lib" / "libtorch_cpu.so").encode()
        # The C function: ``ctypes.CDLL`` would hold the GIL. If it fails, so will the import, which says why.
        with suppress(OSError, AttributeError, RuntimeError):
            Thread(target=ctypes.CDLL(None).dlopen, args=(library, _LAZY), daemon=True).start()


def open_tokenizer_ahead(source: str) -> None:
    """Open the tokenizer of a known model while a thread loads PyTorch's libraries.

    Args:
        source: a model's folder or GGUF file. Errors are left to the loader.
    """
    from yggdrasil.artifacts.gguf import is_gguf
    from yggdrasil.artifacts.homes import expanded
    from yggdrasil.artifacts.models import model_fingerprint
    from yggdrasil.checkpoints.kept_tokenizer import open_ahead
    from yggdrasil.checkpoints.prepared import prepared_root

    folder = expanded(source)
    with suppress(OSError, YggdrasilError):  # the loader raises what is wrong
        if is_gguf(folder):
            folder = prepared_root() / model_fingerprint(folder) / "facts"
        if is_before_torch() and (folder / "config.json").is_file():
            load_torch_libraries()
            open_ahead(folder)


def is_before_torch() -> bool:
    """Return whether PyTorch has not been imported in this process yet, so that its import can still be made faster."""
    return "torch" not in sys.modules


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch the garbage collector off within the block, for the first imports, which it would slow down.

    Objects that exist at the end of the block are exempt from later collections too.
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


def reserve_memory(source: str) -> None:
    """Begin to make memory for the weights of a model resident in a thread.

    Args:
        source: GGUF file or checkpoint folder. Errors are left to the loader.
    """
    from yggdrasil.artifacts.gguf import is_gguf
    from yggdrasil.artifacts.homes import expanded
    from yggdrasil.artifacts.memory import reserve
    from yggdrasil.artifacts.models import packed_bytes

    model = expanded(source)
    with suppress(OSError, YggdrasilError):  # the loader raises what is wrong
        if is_before_torch() and (model.is_dir() or is_gguf(model)):
            reserve(int(_SHARE * packed_bytes(model)))
