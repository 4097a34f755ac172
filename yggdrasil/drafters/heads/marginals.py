"""Candidates per depth that one pass finds, and the steps that grow tree levels from them without a further pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.heads.medusa.steps import MedusaLevelStep
from yggdrasil.drafters.level_drafter import FinishStep, LevelSteps
from yggdrasil.runtime.passes import HostBuffer, StepModule
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class Marginals:
    """Table of the candidates at each depth, with log-probabilities, that the pass of a Medusa or block head writes.

    The table is [``num_depths``, ``num_candidates``]; ``num_candidates`` defaults to ``tree.candidates``. The steps
    that grow trees from the table are defined too. The step ``level`` attaches nodes and adds their candidates to the
    pool, by default those of each node's depth. The buffers ``more`` are further inputs of ``level`` and of the pass.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tree: TokenTree,
        widths: Sequence[int],
        num_depths: int,
        knots: Tensor,
        *,
        level: StepModule | None = None,
        more: Sequence[Tensor] = (),
        num_candidates: int | None = None,
    ) -> None:
        device, size = knots.device, (num_depths, num_candidates or tree.candidates)
        table = [torch.zeros(size, device=device), torch.zeros(size, dtype=torch.int64, device=device)]
        self.written = [
            *table,
            *more,
            knots,
            *tree.draft_tensors(),
        ]  # inputs of the pass, which writes table, more and tree
        place = HostBuffer(2, device)
        self.levels = LevelSteps(runner, place)
        rows = torch.arange(max(widths), device=device)
        for width in widths:
            inputs = [place.tensor, rows[:width]]
            runner.define("grow", width, level or MedusaLevelStep(), [*inputs, *self.written])
            runner.define("finish", width, FinishStep(), [*inputs, *tree.tensors()])
