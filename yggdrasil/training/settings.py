"""Settings of the training of a head, and the interface that shows its progress."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from yggdrasil.scheduling.plan import DeviceName

CONTEXT = 192  # most tokens of a prompt, from its end, that a training uses
Kind = Literal["eagle3", "dflash"]  # kinds of heads that can be trained
SHOWN = 5  # draft steps for which agreement is reported


def work_folder(out: Path) -> Path:
    """Return the folder with the state of the training that writes a drafter to the folder ``out``."""
    return out.with_name(out.name + ".training")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run of a head."""

    target: str  # a checkpoint folder, .gguf file or hub id
    out: Path  # folder for the trained drafter
    kind: Kind = "eagle3"
    prompts: tuple[Path, ...] = ()  # JSON lines; the target answers them
    texts: tuple[Path, ...] = ()  # existing text to train on; see ``generates``
    minutes: float = 60.0  # length of the run
    tokens: int | None = None  # tokens to generate, in at most 2/3 of the time; None: as many as 1/3 of the time gives
    threads: int = 0  # CPU threads; 0: one per core
    start: Path | None = None  # an EAGLE-3 head from whose weights to start
    device: DeviceName = "cpu"  # device of target and drafter
    is_beside_use: bool = False  # trains beside a decoder: reads the shipped answers too; see ``generates``

    @property
    def generates(self) -> bool:
        """Whether the target generates text: with prompts or ``tokens``, or without texts and ``is_beside_use``."""
        return not (self.texts or self.is_beside_use) or bool(self.prompts) or self.tokens is not None

    @property
    def work(self) -> Path:
        """Folder with the state from which an interrupted or repeated training resumes: ``OUT.training``."""
        return work_folder(self.out)

    @property
    def answers(self) -> Path:
        """File of answers that a decoder stored to train on, JSON lines of token ids; the file may not exist."""
        return self.work / "answers.jsonl"


class Teller(Protocol):
    """Shows progress and messages of a training."""

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase called ``title``, and return a function that takes the fraction done, 0 to 1."""

    def tell(self, line: str) -> None:
        """Print ``line`` above the progress bar."""
