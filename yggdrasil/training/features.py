"""Caches the target's hidden states over the training text on disk, so that later epochs need no target pass.

Dims: T cached tokens of a window, S concatenated hidden sizes of the layers that a drafter reads, H hidden size.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from yggdrasil.artifacts import write_atomic
from yggdrasil.calibration.work_folder import read_or_drop
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import decoder_layers
from yggdrasil.training.unroll import Batch
from yggdrasil.training.windows import Window

SHARD = 64  # windows that are computed, stored and trained on together
_MIXED = 16  # shards that share 1,024 consecutive windows: neighbouring windows may have similar prompts
_READ = 16  # batch size of the target's passes
_MOST_OF_FREE = 0.5  # share of the disk's free space that one file may take


class Kept(NamedTuple):
    """The cached tokens and hidden states of one window."""

    tokens: Tensor  # [T] int64
    states: Tensor  # [T, S] bfloat16
    last: Tensor  # [T, H] bfloat16: input of the target's LM head
    answer: int  # index of the answer's first token


def shards(windows: Sequence[Window]) -> list[list[Window]]:
    """Split training windows into shards of at most 64: each 1,024 windows are dealt in turn to 16 shards.

    Appending windows does not change the shards of complete groups of 1,024.
    """
    found = []
    for start in range(0, len(windows), SHARD * _MIXED):
        stretch = windows[start : start + SHARD * _MIXED]
        found += [list(stretch[place::_MIXED]) for place in range(_MIXED)]
    return [shard for shard in found if shard]


class Features:
    """Computes and caches, in ``folder``, the target's states over windows: outputs of ``layers``, LM head inputs."""

    def __init__(self, loaded: LoadedModel, layers: Sequence[int], folder: Path) -> None:
        self._loaded, self._layers, self._folder = loaded, tuple(layers), folder

    def has(self, name: str, windows: Sequence[Window]) -> bool:
        """Return whether the hidden states of ``windows`` are stored on disk under ``name``."""
        return self._file(name, windows).exists()

    def load_or_compute(self, name: str, windows: Sequence[Window]) -> list[Kept]:
        """Return the target's hidden states over ``windows``, in order; compute and store them if not on disk.

        States that would take more than half of the free disk space are not stored. The name of the file has ``name``,
        the number of windows and the windows' total length.
        """
        file = self._file(name, windows)
        kept: dict[str, Tensor] | None = None
        with suppress(YggdrasilError):  # the file cannot be read now
            kept = read_or_drop(file, load_file)
        if kept is None:
            kept = self._read(windows)
            with suppress(OSError, ArtifactError):  # the states are computed again next time
                self._keep(kept, name, file)
        ends = [0, *torch.tensor([window.length for window in windows]).cumsum(0).tolist()]
        return [
            Kept(kept["tokens"][begin:end], kept["states"][begin:end], kept["last"][begin:end], window.answer)
            for window, (begin, end) in zip(windows, pairwise(ends), strict=True)
        ]

    def _keep(self, read: dict[str, Tensor], name: str, file: Path) -> None:
        """Delete older files of ``name``, and write ``file`` if it takes less than half of the free disk space."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for older in self._folder.glob(f"{name}-*"):
            older.unlink()
        if sum(tensor.nbytes for tensor in read.values()) < _MOST_OF_FREE * shutil.disk_usage(self._folder).free:
            write_atomic(file, save(read))

    def _file(self, name: str, windows: Sequence[Window]) -> Path:
        length = sum(window.length for window in windows)
        return self._folder / f"{name}-{len(windows)}-{length}.safetensors"

    def _read(self, windows: Sequence[Window]) -> dict[str, Tensor]:
        """Return "tokens", "states" and "last" as in ``Kept``, concatenated over ``windows`` in order."""
        order = sorted(range(len(windows)), key=lambda number: len(windows[number].tokens))
        read: dict[int, tuple[Tensor, Tensor]] = {}
        with own_attention(self._loaded.model):
            for start in range(0, len(order), _READ):
                numbers = order[start : start + _READ]
                read |= dict(zip(numbers, self._batch([windows[number] for number in numbers]), strict=True))
        tokens = [token for window in windows for token in window.tokens[window.start :]]
        parts = [read[number] for number in range(len(windows))]
        return {
            "tokens": torch.tensor(tokens),
            "states": torch.cat([states for states, _ in parts]),
            "last": torch.cat([last for _, last in parts]),
        }

    @torch.inference_mode()
    def _batch(self, windows: Sequence[Window]) -> list[tuple[Tensor, Tensor]]:
        longest = max(len(window.tokens) for window in windows)
        tokens = torch.zeros(len(windows), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, window in enumerate(windows):
            tokens[row, : len(window.tokens)] = torch.tensor(window.tokens)
            mask[row, : len(window.tokens)] = 1
        captured: dict[int, Tensor] = {}
        model: Any = self._loaded.model
        with ExitStack() as hooks:
            for layer in set(self._layers):
                hooks.callback(_note(decoder_layers(model)[layer], captured, layer))
            device = self._loaded.device
            output = model.base_model(tokens.to(device), attention_mask=mask.to(device), use_cache=False)
        last = output.last_hidden_state.bfloat16().cpu()
        none = last.new_zeros(*last.shape[:2], 0)  # for drafters that read no layer's output: [B, T, 0]
        states = torch.cat([none, *(captured[layer].bfloat16().cpu() for layer in self._layers)], dim=-1)
        return [
            (states[row, window.start : len(window.tokens)], last[row, window.start : len(window.tokens)])
            for row, window in enumerate(windows)
        ]


def _note(module: nn.Module, captured: dict[int, Tensor], layer: int) -> Any:
    def note(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        captured[layer] = output if isinstance(output, Tensor) else output[0]

    return module.register_forward_hook(note).remove


def stack_windows(items: Sequence[Kept], *, learns_prompts: bool = False) -> Batch:
    """Stack windows into one batch, padded on the right to the longest.

    Args:
        learns_prompts: train on the stored prompt tokens too, from the third on; False: train on answers alone.
    """
    longest = max(len(item.tokens) for item in items)

    def padded(part: str) -> Tensor:
        return nn.utils.rnn.pad_sequence([getattr(item, part) for item in items], batch_first=True)

    following = torch.arange(longest) + 1
    begins = [min(item.answer, 2) if learns_prompts else item.answer for item in items]
    learned = [(following >= begin) & (following < len(item.tokens)) for item, begin in zip(items, begins, strict=True)]
    return Batch(padded("tokens"), padded("states").float(), padded("last").float(), torch.stack(learned))
