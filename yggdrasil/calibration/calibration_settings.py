"""Settings of a calibration: models, prompts and effort."""

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
from yggdrasil.scheduling.plan import DeviceName, ModelRef, Plan, Shapes, portable_source


@dataclass(frozen=True)
class PairSource:
    """Everything needed to load a target and its drafter, in this process or another."""

    target: str  # folder, GGUF file or hub id
    drafter: str | None  # the same of a draft model, or a draft head
    dtype: DtypeName
    target_threads: int  # 0: to be measured
    drafter_threads: int  # 0: to be measured
    shapes: Shapes
    weights: Weights = "full"  # of the target
    drafter_weights: Weights = "full"
    device: DeviceName = "cpu"
    model_free: tuple[ModelFreeOptions, ...] = ()  # model-free drafters
    schedules: tuple[tuple[str, ...], ...] = ()  # further schedules, as stage labels, whose steps are built
    vocabulary: Vocabulary | None = None  # draft vocabulary of a head; None: all its tokens, or not chosen yet
    backend: Backend | None = None  # None: the device's default

    @classmethod
    def of_plan(cls, plan: Plan, folder: Path) -> "PairSource":
        """Return everything needed to load the models of ``plan``.

        Args:
            folder: predictor folder of the plan, which has the head's draft vocabulary.

        Raises:
            YggdrasilError: the file of the draft vocabulary is missing, damaged or from another calibration.
        """
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
        """Options of the n-gram statistics drafter; None if it is not used."""
        return next((each for each in self.model_free if isinstance(each, StatisticsOptions)), None)

    def target_ref(self) -> ModelRef:
        """Return the plan's record of the target: portable source, fingerprint, CPU threads and weight format."""
        return _model_ref(self.target, self.target_threads, self.weights)

    def drafter_refs(self) -> list[ModelRef]:
        """Return the plan's record of the draft model or head, in a list; an empty list if there is neither."""
        return [] if self.drafter is None else [_model_ref(self.drafter, self.drafter_threads, self.drafter_weights)]

    def without_drafter(self) -> "PairSource":
        """Return a copy without the draft model or head, in which n-gram statistics, if used, read an n-gram table."""
        return replace(
            self, drafter=None, drafter_threads=0, drafter_weights="full", shapes=replace(self.shapes, draft_widths=()),
            vocabulary=None,
            model_free=tuple(
                replace(each, table=True) if isinstance(each, StatisticsOptions) else each for each in self.model_free
            ),
        )  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of this package, PyTorch and transformers, as a plan records them."""
    return {
        "yggdrasil": yggdrasil.__version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


class TextBudget(NamedTuple):
    """Limit of the text that the target generates: ``seconds`` or ``tokens`` in total, whichever comes first."""

    seconds: float  # infinite if only tokens count
    tokens: int | None = None  # None: only seconds count

    def share(self, tokens: int, seconds: float) -> float:
        """Return the share of the budget that ``tokens`` or ``seconds`` use up, whichever is larger, from 0 to 1."""
        of_time = seconds / self.seconds if self.seconds else 1.0
        of_tokens = 0.0 if self.tokens is None else tokens / self.tokens if self.tokens else 1.0
        return min(max(of_time, of_tokens), 1.0)

    def seconds_left(self, seconds: float) -> float:
        """Return the remaining seconds of the budget after ``seconds``; negative if the budget is exceeded."""
        return self.seconds - seconds

    def is_late(self, seconds: float) -> bool:
        """Return whether the budget's time is used up after ``seconds``."""
        return self.seconds_left(seconds) <= 0.0


_ROOM = 256  # tokens after a measured context, for the timed iterations
_LONGEST = 8192  # longest measured context in tokens: longer ones take minutes to read and extrapolate well
_LONG = 3072  # tokens: three times the longest default context


@dataclass(frozen=True)
class Effort:
    """How much a calibration measures."""

    documents: int = 40  # prompts on which acceptance is recorded
    tokens: int = 96  # generated after each of these prompts
    prompt_tokens: int = 256  # a longer prompt is cut to so many last tokens
    contexts: tuple[int, ...] = (128, 512, 1024)  # lengths in tokens at which costs are measured
    long_contexts: tuple[float, ...] = (0.5, 1.0)  # further lengths, as shares of a long ``max_length``
    samples: int = 24  # timed iterations per tree shape and context
    own_text: float = 600.0  # seconds of generating text for a table, earlier runs of this calibration included

    def contexts_within(self, max_length: int) -> list[int]:
        """Return the context lengths, in tokens, at which a calibration measures step costs.

        They are the ``contexts`` that leave room for the timed iterations. If ``max_length`` (prompt included) is at
        least 3,328, the shares ``long_contexts`` of min(``max_length``, 8,192) - 256 are added: there attention
        dominates a pass, and each further row costs nearly as much as the first.
        """
        limit = min(max_length, _LONGEST) - _ROOM
        fitting = [context for context in self.contexts if context <= limit] or [max(limit, 1)]
        return [*fitting, *(int(share * limit) for share in self.long_contexts)] if limit >= _LONG else fitting


# One long context: reading 8,000 tokens takes a large model minutes.
QUICK = Effort(documents=20, tokens=64, contexts=(128,), long_contexts=(0.5,), samples=8, own_text=60.0)
QUICK_WIDTHS = (1, 2, 4), (1, 2, 3, 4, 6, 8, 16, 32)  # draft and verify widths
FIRST_DRAFT_WIDTHS = (1, 2, 4)
# Of a first use. On a CPU a pass over 3 rows takes less time than over 4; on a GPU 32 rows take little more than 1 row.
FIRST_VERIFY_WIDTHS: dict[DeviceName, tuple[int, ...]] = {"cpu": (1, 2, 3, 4, 6, 8, 16), "cuda": (1, 2, 4, 8, 16, 32)}


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of one calibration."""

    pair: PairSource
    prompts: Path  # JSON lines with a prompt field
    name: str  # name of the plan
    root: Path  # folder that has the folders plans, profiles and predictors
    effort: Effort
    chat: bool = False  # whether plain prompts become a user's message in the target's chat template
    table_tokens: int | None = None  # tokens of the text for an n-gram table; None: limited by ``effort.own_text``
    own_table: bool = False  # whether the n-gram table counts only the target's text, no shipped text
    keeps_drafter: bool = False  # whether a drafter that does not pay off is kept

    @property
    def tokens(self) -> int:
        """Tokens to generate per prompt for acceptance traces, at most half of the context."""
        return min(self.effort.tokens, self._room // 2)

    @property
    def prompt_tokens(self) -> int:
        """Maximum number of tokens of a prompt; of a longer prompt only the last tokens are used."""
        return min(self.effort.prompt_tokens, self._room - self.tokens)

    @property
    def _room(self) -> int:
        """Longest text in tokens that leaves room for a tree of the greatest depth."""
        return self.pair.shapes.max_length - self.pair.shapes.max_depth - 1

    @property
    def text_budget(self) -> TextBudget:
        """Budget (seconds or tokens) of the text that the target generates for n-gram statistics."""
        return TextBudget(self.effort.own_text if self.table_tokens is None else inf, self.table_tokens)

    def identity(self) -> dict[str, Any]:
        """Return the settings that must be unchanged to resume an interrupted calibration, by name.

        ``json.dumps`` with ``default=str`` can write them.
        """
        stat = self.prompts.stat()
        return {
            **asdict(self.pair),
            "versions": list(versions().values()),
            "models": [Source.find(model).fingerprint() for model in (self.pair.target, self.pair.drafter) if model],
            **asdict(self.effort),
            "chat": self.chat,
            "table_tokens": self.table_tokens,
            "prompts": [str(self.prompts), stat.st_size, stat.st_mtime_ns],
        }


def _model_ref(source: str, threads: int, weights: Weights) -> ModelRef:
    return ModelRef(portable_source(source), Source.find(source).fingerprint(), threads, weights)
