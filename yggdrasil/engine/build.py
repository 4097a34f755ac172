"""Put an engine together from two checkpoints and the shapes it may use."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from yggdrasil.drafters.draft_model import DraftModel, identity_knots
from yggdrasil.drafters.protocol import Drafter
from yggdrasil.engine.engine import Engine
from yggdrasil.engine.target import TargetModel
from yggdrasil.models.compiled import Backend
from yggdrasil.models.loading import LoadedModel
from yggdrasil.models.runner import ModelRunner
from yggdrasil.scheduling.stages import DEFAULT_ORDER
from yggdrasil.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Shapes:
    """Every size that is fixed before the first token."""

    max_length: int = 2048  # tokens of a request, prompt included
    draft_widths: tuple[int, ...] = (1, 2, 4, 8)
    max_depth: int = 8
    candidates: int = 8  # continuations remembered a drafted node
    verify_widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prefill_widths: tuple[int, ...] = (16, 128)

    def __post_init__(self) -> None:
        for name in ("draft_widths", "verify_widths", "prefill_widths"):
            widths = getattr(self, name)
            if not widths or list(widths) != sorted(set(widths)) or widths[0] < 1:
                raise ValueError(f"{name} must be ascending, distinct and at least 1, got {widths}")
        if self.max_depth < 1 or self.max_length < 2:
            raise ValueError(f"{self.max_depth = } and {self.max_length = } must be at least 1 and 2")
        if self.draft_widths[-1] > self.candidates:
            raise ValueError(
                f"candidates ({self.candidates}) must reach the widest draft width {self.draft_widths[-1]}"
            )

    @property
    def num_nodes(self) -> int:
        """Capacity of the tree, root included."""
        return max(1 + self.max_depth * self.draft_widths[-1], self.verify_widths[-1])

    @property
    def cache_capacity(self) -> int:
        """Cache slots: the longest text, and behind it the widest step's scratch."""
        return self.max_length + max(self.num_nodes, self.prefill_widths[-1], self.max_depth + 1)


@dataclass(frozen=True)
class Assembly:
    """An engine with the runners it was built from."""

    engine: Engine
    target: ModelRunner
    drafter: ModelRunner | None
    shapes: Shapes = field(default_factory=Shapes)

    def warm(self, needed: Sequence[tuple[str, str, int]] | None = None) -> None:
        """Build steps now instead of on first use: those listed as (runner, step, width), or all."""
        for name, runner in (("target", self.target), ("drafter", self.drafter)):
            for step, width in runner.defined if runner is not None else ():
                if runner is not None and (needed is None or (name, step, width) in needed):
                    runner.step(step, width)


def assemble(
    target: LoadedModel,
    drafter: LoadedModel | Drafter | None,
    vocab_size: int,
    shapes: Shapes,
    backend: Backend,
    *,
    knots: torch.Tensor | None = None,
    stages: Sequence[str] = DEFAULT_ORDER,
) -> Assembly:
    """Allocate caches and tree, define every step. Nothing is compiled before a step is first used or warmed."""
    tree = TokenTree.allocate(shapes.num_nodes, min(shapes.candidates, vocab_size), target.device)
    drafter_runner = None
    chosen: Drafter | None
    if isinstance(drafter, LoadedModel):
        drafter_runner = ModelRunner(drafter, shapes.cache_capacity, vocab_size, backend)
        chosen = DraftModel(
            drafter_runner, tree, shapes.draft_widths, shapes.max_depth + 1, shapes.prefill_widths,
            identity_knots() if knots is None else knots,
        )  # fmt: skip
    else:
        chosen = drafter
    hidden_layers = chosen.hidden_layers if chosen is not None else ()
    target_runner = ModelRunner(target, shapes.cache_capacity, vocab_size, backend, hidden_layers)
    model = TargetModel(target_runner, tree, shapes.verify_widths, shapes.prefill_widths)
    limit = min(shapes.max_length, target.max_context)
    if isinstance(drafter, LoadedModel):
        limit = min(limit, drafter.max_context)
    engine = Engine(model, chosen, tree, shapes.verify_widths, limit, stages)
    return Assembly(engine, target_runner, drafter_runner, shapes)
