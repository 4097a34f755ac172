"""What a training is asked to do."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from yggdrasil.scheduling.plan import DeviceName

CONTEXT = 192  # tokens of a prompt that are kept before its answer
SHOWN = 5  # draft steps that agreement is told of

Kind = Literal["eagle3", "medusa", "draft-model"]


@dataclass(frozen=True)
class TrainSettings:
    """One training: the target, where the drafter goes, and how long it may take."""

    target: str
    out: Path
    kind: Kind = "eagle3"
    prompts: tuple[Path, ...] = ()
    minutes: float = 60.0
    tokens: int | None = None  # of the target's own, if two thirds of the time give them; else what a third does
    threads: int = 0  # 0: as many as there are cores
    start: Path | None = None  # a head to begin as
    device: DeviceName = "cpu"  # of the target and of the drafter

    @property
    def work(self) -> Path:
        """What an interrupted training goes on from, and a longer one too."""
        return self.out.with_name(self.out.name + ".training")


class Teller(Protocol):
    """Where progress goes."""

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase and return where its fraction is reported."""

    def tell(self, line: str) -> None:
        """Show a line that stays."""
