"""Where a training stands: on disk after every look at it, so that it goes on from there."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from yggdrasil.artifacts import write_atomic

_FILE = "state.safetensors"
_MOST_AVERAGED = 0.998  # the average's memory, once there have been some hundred steps


@dataclass(frozen=True)
class Look:
    """How a head did on held-out text."""

    seconds: float  # of training so far
    tokens: int  # learned so far, counted as often as they were
    loss: float  # lately, in training
    agreement: list[float]  # first guesses that are the target's choice, by draft step
    best_four: list[float]  # the choice is among the four likeliest

    @property
    def expected(self) -> float:
        """Tokens a pass that a chain of four would give, the bonus token included."""
        total, product = 1.0, 1.0
        for share in self.agreement[:4]:
            product *= share
            total += product
        return total


@dataclass
class Progress:
    """How far a training is."""

    identity: str  # of target, layers and vocabulary: of another one nothing is kept
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    place: int = 0  # shards of this pass that are done
    looks: list[Look] = field(default_factory=list)


class Training:
    """A drafter in training, its running average and its optimizer."""

    def __init__(self, head: nn.Module, average: nn.Module, rate: float) -> None:
        self.head, self.average = head, average
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def follow(self, steps: int) -> None:
        """Move the average towards the head, faster at first."""
        share = 1 - min(_MOST_AVERAGED, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.head.parameters()), share)

    def save(self, work: Path, progress: Progress) -> None:
        """Write everything that going on needs."""
        tensors: dict[str, Tensor] = {}
        for prefix, module in (("head", self.head), ("average", self.average)):
            tensors |= {f"{prefix}.{name}": tensor for name, tensor in _own(module).items()}
        for name, parameter in self.head.named_parameters():
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_atomic(work / _FILE, save(contiguous, {"progress": json.dumps(asdict(progress))}))

    @torch.no_grad()
    def load(self, work: Path) -> None:
        """Take up what ``save`` wrote."""
        with safe_open(work / _FILE, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        for prefix, module in (("head", self.head), ("average", self.average)):
            module.load_state_dict({name: tensors[f"{prefix}.{name}"] for name in _own(module)}, strict=False)
        for name, parameter in self.head.named_parameters():
            moments = {part: tensors.get(f"{part}.{name}") for part in ("step", "exp_avg", "exp_avg_sq")}
            if all(value is not None for value in moments.values()):
                self.optimizer.state[parameter] = moments


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The module's tensors, each once: a table that serves two layers is kept under its first name."""
    found = {tensor.data_ptr(): name for name, tensor in reversed(module.state_dict().items())}
    tensors = module.state_dict()
    return {name: tensors[name] for name in tensors if name in found.values()}


def read_progress(work: Path) -> Progress | None:
    """How far the training in ``work`` is; None where there is none, or its file is damaged."""
    try:
        with safe_open(work / _FILE, "pt") as file:
            record = json.loads(file.metadata()["progress"])
        return Progress(**record | {"looks": [Look(**look) for look in record["looks"]]})
    except Exception:  # noqa: BLE001  (whatever a damaged file makes of it)
        return None


def read_vocabulary(work: Path, size: int) -> Tensor:
    """The target's tokens that the head in ``work`` drafts."""
    with safe_open(work / _FILE, "pt") as file:
        if "head.d2t" not in file.keys():  # noqa: SIM118
            return torch.arange(size)
        table: Tensor = file.get_tensor("head.d2t")
    return table + torch.arange(len(table))
