"""The state of a training, saved after every evaluation so that the training can resume."""

import hashlib
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from yggdrasil.artifacts import parse_dataclass, parse_json, shown, write_atomic
from yggdrasil.calibration.work_folder import read_or_drop
from yggdrasil.errors import ArtifactError, YggdrasilError

_FILE = "state.safetensors"
_BEGUN = 0.5  # weight of the initial head in the result, which is more accurate than either head, most on new text
_MOST_AVERAGED = 0.9985  # decay of the weights' moving average, reached after thousands of steps


@dataclass(frozen=True)
class Look:
    """The result of one evaluation on held-out text."""

    seconds: float  # seconds of training so far
    tokens: int  # trained tokens so far, repeats included
    loss: float  # moving average of the training loss
    agreement: list[float]  # share of argmax tokens equal to the target's, by draft step
    best_four: list[float]  # share of target tokens in the top 4, by draft step

    @property
    def expected(self) -> float:
        """Expected tokens per pass with a chain of four drafted tokens, bonus token included."""
        total, product = 1.0, 1.0
        for share in self.agreement[:4]:
            product *= share
            total += product
        return total


@dataclass
class Progress:
    """Counters and evaluations of a training over all its runs."""

    identity: str  # the target's fingerprint
    kind: str = "eagle3"  # kind of the head
    steps: int = 0  # training steps
    tokens: int = 0  # trained tokens, repeats included
    seconds: float = 0.0  # seconds of training
    passes: int = 0  # completed epochs
    place: int = 0  # completed shards of the present epoch
    began_as: str = ""  # name of the initial head (--start)
    began_with: str = ""  # fingerprint of the initial head
    looks: list[Look] = field(default_factory=list)


class Training:
    """A drafter in training, the moving average of its weights, and its optimizer."""

    def __init__(self, head: nn.Module, average: nn.Module, rate: float) -> None:
        self.head, self.average = head, average
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.begun: dict[str, Tensor] = {}  # parameters of the initial drafter (--start), if any

    def start_from(self, other: nn.Module) -> None:
        """Start from the weights of ``other``, a drafter of the same shape; ``result`` averages them in."""
        for module in (self.head, self.average):
            module.load_state_dict(other.state_dict())
        self.begun = {name: parameter.detach().clone() for name, parameter in self.head.named_parameters()}

    @torch.no_grad()
    def result(self) -> nn.Module:
        """Return the drafter to publish: the moving average of the weights.

        If training started from another drafter (``start_from``), the result is the mean of the moving average and that
        drafter's weights. The mean keeps more of what the drafter had learned from other text (arXiv 2109.01903).
        """
        if not self.begun:
            return self.average
        mean = deepcopy(self.average)
        for name, parameter in mean.named_parameters():
            parameter.lerp_(self.begun[name], _BEGUN)
        return mean

    @torch.no_grad()
    def update_average(self, steps: int) -> None:
        """Update the moving average of the weights after training step ``steps``, counted from 0."""
        share = 1 - min(_MOST_AVERAGED, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.head.parameters()), share)

    def save(self, work: Path, progress: Progress) -> None:
        """Write weights, optimiser and ``progress`` to the folder ``work``, replacing an earlier state.

        ``KeptTraining.read`` and ``load`` restore the state.

        Raises:
            ArtifactError: a file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for prefix, module in (("head", self.head), ("average", self.average)):
            tensors |= {f"{prefix}.{name}": tensor for name, tensor in _own(module).items()}
        tensors |= {f"begun.{name}": tensor for name, tensor in self.begun.items()}
        for name, parameter in self.head.named_parameters():
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
        contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        said = json.dumps(asdict(progress))
        write_atomic(work / _FILE, save(contiguous, {"progress": said, "digest": _digest(said, contiguous)}))

    @torch.no_grad()
    def load(self, kept: "KeptTraining") -> None:
        """Restore weights and optimiser from the state of an earlier run; ``kept.progress`` is not used.

        Raises:
            YggdrasilError: the state lacks a weight or is of a drafter of another shape.
        """
        self._check(kept)
        tensors = kept.tensors
        for prefix, module in (("head", self.head), ("average", self.average)):
            module.load_state_dict({name: tensors[f"{prefix}.{name}"] for name in _own(module)}, strict=False)
        for name, parameter in self.head.named_parameters():
            if (begun := tensors.get(f"begun.{name}")) is not None:
                self.begun[name] = begun.to(parameter.device)
            step, *moments = (tensors.get(f"{part}.{name}") for part in ("step", "exp_avg", "exp_avg_sq"))
            if step is not None and all(moment is not None for moment in moments):
                mean, squares = (moment.to(parameter.device) for moment in moments if moment is not None)
                self.optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": squares}

    def _check(self, kept: "KeptTraining") -> None:
        """Raise YggdrasilError if a needed tensor is missing or a tensor has another shape."""
        parameters = dict(self.head.named_parameters())
        needed = _shapes("head", _own(self.head)) | _shapes("average", _own(self.average))
        if any(name.startswith("begun.") for name in kept.tensors):
            needed |= _shapes("begun", parameters)
        moments = _shapes("exp_avg", parameters) | _shapes("exp_avg_sq", parameters)
        for name, shape in (needed | moments).items():
            tensor = kept.tensors.get(name)
            if tensor is None and name in needed:
                raise _of_another_version(kept.file, f"{name} is missing")
            if tensor is not None and tensor.shape != shape:
                raise _of_another_version(kept.file, f"{name} is of shape {list(tensor.shape)}, not {list(shape)}")


def _shapes(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {f"{prefix}.{name}": tensor.shape for name, tensor in tensors.items()}


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's tensors by name; tied tensors appear once, under their first name."""
    once = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: tensor for name, tensor in module.state_dict().items() if name in once}


@dataclass(frozen=True)
class KeptTraining:
    """The state of a training that an earlier run wrote."""

    file: Path
    progress: Progress
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, work: Path, identity: str, tell: Callable[[str], None]) -> "KeptTraining | None":
        """Load the training's state from the folder ``work``, or return None if it is missing or damaged.

        A damaged file is deleted.

        Args:
            identity: fingerprint of the target.
            tell: function that gets a sentence about a damaged state.

        Raises:
            YggdrasilError: the state is of another target, cannot be read, or was written by another version.
        """
        file = work / _FILE
        if not file.exists():
            return None
        kept = read_or_drop(file, cls._read)
        if kept is None:
            tell(f"{shown(file)} is damaged: no training can go on from it")
        elif kept.progress.identity != identity:
            raise YggdrasilError(
                f"{shown(work)} is of a training of another target; name another --out, or delete it to begin anew"
            )
        return kept

    @classmethod
    def _read(cls, file: Path) -> "KeptTraining":
        """Load ``file``.

        Raises:
            ValueError, SafetensorError, OSError: the file is damaged.
            YggdrasilError: the file is intact but of an unknown version; the caller does not delete such a file.
        """
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
        said = metadata.get("progress", "")
        if metadata.get("digest") != _digest(said, tensors):
            raise ValueError("changed since it was written")
        try:
            return cls(file, parse_dataclass(Progress, parse_json(said), shown(file)), tensors)
        except ArtifactError as error:
            raise _of_another_version(file, str(error).removeprefix(f"{shown(file)}: ")) from error

    def vocabulary(self, size: int) -> Tensor:
        """Return the token ids that the head drafts, [Vd] int64; 0 to ``size - 1`` without a draft vocabulary."""
        table = self.tensors.get("head.d2t")
        return torch.arange(size) if table is None else table + torch.arange(len(table))


def held_out_agreement(work: Path, identity: str) -> tuple[float, ...]:
    """Return the last held-out agreement, by draft step, of the training whose state is in the folder ``work``.

    The result is empty if there is no state, or the state is damaged, of another version, or of a target with another
    fingerprint than ``identity``. The weights are not read.
    """
    try:
        with safe_open(work / _FILE, "pt") as opened:
            said = (opened.metadata() or {}).get("progress", "")
        progress = parse_dataclass(Progress, parse_json(said), shown(work))
    except (ArtifactError, SafetensorError, OSError, ValueError):
        return ()
    return tuple(progress.looks[-1].agreement) if progress.looks and progress.identity == identity else ()


def _of_another_version(file: Path, reason: str) -> YggdrasilError:
    return YggdrasilError(
        f"{shown(file)} was written by another version of Yggdrasil ({reason.rstrip('.')}) and is left as it is; go on "
        "with that version, or name another --out"
    )


def _digest(said: str, tensors: Mapping[str, Tensor]) -> str:
    hasher = hashlib.sha256(said.encode())
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
