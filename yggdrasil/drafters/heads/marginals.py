"""Candidates per depth that do not depend on the path, and the steps that grow tree levels from them without a pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.draft_model_steps import FinishStep
from yggdrasil.drafters.heads.medusa.steps import MedusaLevelStep
from yggdrasil.drafters.level_drafter import LevelSteps
from yggdrasil.runtime.buffers import HostBuffer
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class Marginals:
    """The table [D, K] of candidates and their log-probabilities that a pass fills, and the steps that attach nodes."""

    def __init__(
        self, runner: ModelRunner, tree: TokenTree, widths: Sequence[int], num_depths: int, knots: Tensor
    ) -> None:
        device, size = knots.device, (num_depths, tree.candidates)
        table = [torch.zeros(size, device=device), torch.zeros(size, dtype=torch.int64, device=device)]
        self.written = [*table, knots, *tree.tensors()]  # inputs of the pass, which writes the table and the tree
        place = HostBuffer(2, device)
        self.levels = LevelSteps(runner, place)
        rows = torch.arange(max(widths), device=device)
        for width in widths:
            inputs = [place.tensor, rows[:width]]
            runner.define("grow", width, MedusaLevelStep(), [*inputs, *self.written])
            runner.define("finish", width, FinishStep(), [*inputs, *tree.tensors()])
