"""Writes a checkpoint's weights as safetensors, holding one shard in memory at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from yggdrasil.errors import first_line


@contextmanager
def raising_os_errors() -> Iterator[None]:
    """Context manager that raises OSError for errors of safetensors and tokenizers in writing a file."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(first_line(error)) from error
    except Exception as error:
        if type(error) is Exception and "(os error " in str(error):  # how tokenizers report a disk error
            raise OSError(first_line(error)) from error
        raise


class ShardWriter:
    """Writer of weights as safetensors shards of at most ``max_bytes`` each; a larger weight gets its own shard."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.num_parameters = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []  # the weight names of each shard written

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a weight to the shard in memory; write that shard first if it would exceed ``max_bytes``."""
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self.num_parameters += tensor.numel()

    def close(self) -> None:
        """Write the shard in memory, and give all shards their final names in Hugging Face's layout.

        The files are model.safetensors, or numbered files with model.safetensors.index.json. Files of the same names
        are replaced.
        """
        self._flush()
        if len(self._shards) == 1:
            self._shard_path(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._shard_path(number).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    def _shard_path(self, number: int) -> Path:
        return self._folder / f"shard-{number}"  # ``close`` renames it, when the number of shards is known

    def _flush(self) -> None:
        with raising_os_errors():
            save_file(self._pending, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0
