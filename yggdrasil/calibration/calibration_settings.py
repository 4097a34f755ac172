"""Settings of a calibration: the pair, the prompts and the effort."""

from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch

import yggdrasil
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.source import Source
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.heads.draft_vocabulary import Vocabulary
from yggdrasil.drafters.model_free_options import ModelFreeOptions, StatisticsOptions
from yggdrasil.engine.loading import DtypeName
from yggdrasil.engine.plan_parts import planned_vocabulary
from yggdrasil.scheduling.plan import DeviceName, Plan, Shapes


@dataclass(frozen=True)
class PairSource:
    """Everything needed to load a target and its drafter, in this process or another."""

    target: str
    drafter: str | None  # the model that drafts
    dtype: DtypeName
    target_threads: int  # 0: not decided yet
    drafter_threads: int
    shapes: Shapes
    weights: Weights = "full"  # of the target
    drafter_weights: Weights = "full"
    device: DeviceName = "cpu"
    model_free: tuple[ModelFreeOptions, ...] = ()  # what guesses without a pass
    schedules: tuple[tuple[str, ...], ...] = ()  # whose steps it must have besides those of plain plans
    vocabulary: Vocabulary | None = None  # what a head drafts among; None: all that it can, or not decided yet
    backend: Backend | None = None  # what builds the steps; None: the usual one of the device

    @classmethod
    def of_plan(cls, plan: Plan, folder: Path) -> "PairSource":
        """The pair that a plan decodes with; what was learned for it lies in ``folder``."""
        source = cls(
            plan.target.path(), None, plan.dtype, plan.target.threads, 1, plan.shapes, plan.target.weights,
            device=plan.device, model_free=plan.model_free,
        )  # fmt: skip
        model = plan.drafter
        if model is None:
            return source
        return replace(
            source, drafter=model.path(), drafter_threads=model.threads, drafter_weights=model.weights,
            vocabulary=planned_vocabulary(plan, folder),
        )  # fmt: skip

    @property
    def counts(self) -> StatisticsOptions | None:
        """What is counted, alone or beside a drafter."""
        return next((each for each in self.model_free if isinstance(each, StatisticsOptions)), None)

    def with_shapes(self, shapes: Shapes) -> "PairSource":
        return replace(self, shapes=shapes)

    def without_drafter(self) -> "PairSource":
        """The target with what guesses without a pass; counts have a table then, as they usually do."""
        return replace(
            self, drafter=None, drafter_threads=0, drafter_weights="full", shapes=replace(self.shapes, draft_widths=()),
            vocabulary=None,
            model_free=tuple(
                replace(each, table=True) if isinstance(each, StatisticsOptions) else each for each in self.model_free
            ),
        )  # fmt: skip


class Budget(NamedTuple):
    """Limit of the text that the target writes: ``seconds`` of writing, or ``tokens`` in all, whichever comes first."""

    seconds: float  # without end where tokens alone count
    tokens: int | None = None

    def share(self, tokens: int, seconds: float) -> float:
        """Share of the budget that is used up, 0 to 1."""
        of_time = seconds / self.seconds if self.seconds else 1.0
        return min(max(of_time, tokens / self.tokens if self.tokens else 0.0), 1.0)

    def seconds_left(self, seconds: float) -> float:
        """How much time there is after so many ``seconds``."""
        return self.seconds - seconds

    def is_late(self, seconds: float) -> bool:
        """Whether time is up."""
        return self.seconds_left(seconds) <= 0.0


_ROOM = 256  # tokens behind a context at which costs are measured: iterations that are timed
_LONGEST = 8192  # tokens behind which costs are measured: reading more takes minutes, and costs go on as they grew
_LONG = 3072  # tokens: three times the longest context at which costs are usually measured


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    documents: int = 40  # prompts traced
    tokens: int = 96  # generated on each
    prompt_tokens: int = 256  # kept of each prompt, the last ones
    contexts: tuple[int, ...] = (128, 512, 1024)  # lengths at which costs are measured
    samples: int = 24  # iterations a shape and context
    own_text: float = 600.0  # seconds that the target writes for a table; what it wrote before counts too

    def contexts_within(self, max_length: int) -> list[int]:
        """Those of ``contexts`` that a text of ``max_length`` has room for; of a long one its middle and its end too.

        There attention is most of a pass, and rows beside the first cost nearly as much as it does.
        """
        limit = min(max_length, _LONGEST) - _ROOM
        fitting = [context for context in self.contexts if context <= limit] or [max(limit, 1)]
        return [*fitting, limit // 2, limit] if limit >= _LONG else fitting


QUICK = Effort(documents=20, tokens=64, contexts=(128,), samples=8, own_text=60.0)
QUICK_WIDTHS = (1, 2, 4), (1, 2, 4, 6, 8, 16, 32)  # draft and verify widths
FIRST_WIDTHS = (1, 2, 4), (1, 2, 4, 6, 8, 16)  # of a model that nobody calibrated


@dataclass(frozen=True)
class CalibrationSettings:
    """One calibration: the pair, the prompts, the name and the effort."""

    pair: PairSource
    prompts: Path
    name: str
    root: Path
    effort: Effort
    chat: bool = False  # plain prompts are a user's turn in the target's chat template
    table_tokens: int | None = None  # tokens that the target writes for a table; else what the effort's time gives
    own_table: bool = False  # count this calibration's text alone, whatever tables of the target there are
    keeps_drafter: bool = False  # whether it pays or not

    @property
    def tokens(self) -> int:
        """Generated on each prompt: of a short context no more than half."""
        return min(self.effort.tokens, self._room // 2)

    @property
    def prompt_tokens(self) -> int:
        """Kept of each prompt, the last ones."""
        return min(self.effort.prompt_tokens, self._room - self.tokens)

    @property
    def _room(self) -> int:
        """Longest text in tokens that leaves room for a tree of the greatest depth."""
        return self.pair.shapes.max_length - self.pair.shapes.max_depth - 1

    @property
    def own_text(self) -> Budget:
        """How much text the target writes."""
        return Budget(self.effort.own_text if self.table_tokens is None else inf, self.table_tokens)

    def identity(self) -> dict[str, Any]:
        """What must be unchanged for an interrupted calibration to be resumed."""
        stat = self.prompts.stat()
        return {
            **asdict(self.pair),
            "versions": [yggdrasil.__version__, str(torch.__version__), version("transformers")],
            "models": [Source.find(model).fingerprint() for model in (self.pair.target, self.pair.drafter) if model],
            **asdict(self.effort),
            "chat": self.chat,
            "table_tokens": self.table_tokens,
            "prompts": [str(self.prompts), stat.st_size, stat.st_mtime_ns],
        }
