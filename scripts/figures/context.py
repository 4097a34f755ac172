"""The context that all figures share: models, prompt sets, trees, and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from bench_systems import EngineSystem, Sample, System, summarise_systems
from prompt_sets import sets_by_name
from rivals.trees import TREES, TreeBench, TreeSystem, drafting_ms, tree_systems
from sample_store import SampleFile, measure, model_drafter, pair_settings

from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.bench.compare import encode_prompts
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.plan_parts import planned_policy
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.objective import Objective
from yggdrasil.prompts import read_prompts
from yggdrasil.scheduling.plan import Plan

OURS, PLAIN = "yggdrasil, by plan", "plain, compiled"


@dataclass(frozen=True)
class Effort:
    """How much the figures measure."""

    prompts: int = 8  # evaluated per set
    chat: bool = False  # plain prompts are a user's turn in the chat template
    held_back: int = 6  # further prompts per set, on which static trees are calibrated
    max_new_tokens: int = 64
    max_prompt_tokens: int = 256
    max_budgets: int = 6  # number of verify widths, the widest ones
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

    @property
    def num_prompts(self) -> int:
        """Number of prompts that each set needs."""
        return self.prompts + self.held_back


QUICK = Effort(prompts=2, held_back=2, max_new_tokens=24, max_budgets=3, temperatures=(0.0, 0.5, 1.0))


@dataclass(frozen=True)
class Figure:
    """One figure: its data and how to draw it."""

    name: str
    title: str
    frame: pd.DataFrame
    x: str
    y: Sequence[str]  # columns, one panel each
    series: str | None = None
    is_line: bool = False
    is_log: bool = True  # whether the x axis of lines is logarithmic
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)  # further columns in the panel of a column


class FigureContext:
    """Measurements of one plan; each is stored in ``out/data`` and reused."""

    def __init__(
        self, decoder: Decoder, texts: Mapping[str, Mapping[str, Sequence[int]]], out: Path, effort: Effort
    ) -> None:
        """Take a ``decoder`` with a plan, and ``texts``: set name -> prompt id -> tokens.

        Raises:
            YggdrasilError: a set has too few prompts.
        """
        assert decoder.plan is not None
        self.decoder, self.plan = decoder, decoder.plan
        self.out, self.effort = out, effort
        self.costs = self.plan.costs[0].steps()
        self._reporter: Reporter | None = None
        self._texts = texts
        for name, prompts in texts.items():
            if len(prompts) < effort.num_prompts:
                found, needed = len(prompts), effort.num_prompts
                raise YggdrasilError(f"the set {name} has {found} prompts, {needed} are needed; give more, or --quick")

    def report_to(self, reporter: Reporter) -> None:
        """Report progress to ``reporter`` from now on."""
        self._reporter = reporter

    @property
    def sets(self) -> list[str]:
        """Names of the prompt sets."""
        return list(self._texts)

    def held_back(self, prompt_set: str) -> list[Sequence[int]]:
        """Return the prompts of a set on which static trees are calibrated."""
        return list(self._texts[prompt_set].values())[self.effort.prompts :]

    @property
    def budgets(self) -> list[int]:
        """Verify budgets of the trees, ascending."""
        return [width for width in self.plan.shapes.verify_widths if width > 1][-self.effort.max_budgets :]

    @cached_property
    def trees(self) -> TreeBench:
        """The engine of all trees, with every verify width of the plan."""
        widths = [width for width in self.plan.shapes.verify_widths if width > 1]
        return TreeBench(self.decoder, widths, self.costs)

    def samples(self, name: str, systems: Sequence[System], prompt_set: str) -> list[Sample]:
        """Return the samples of ``systems`` on the evaluated prompts of ``prompt_set``.

        They are stored in data/NAME-SET.json, and those already there are not measured again. Raises: YggdrasilError if
        that file was measured with other settings.
        """
        texts = dict(list(self._texts[prompt_set].items())[: self.effort.prompts])
        settings = {**self.described(), "prompts_file": prompt_set, "systems": [system.name for system in systems]}
        file = SampleFile(self.out / "data" / f"{name}-{prompt_set}.json", settings)
        title = f"{name} on {prompt_set}: {len(systems)} systems, {len(texts)} prompts"
        report = self._reporter.phase(title) if self._reporter else _silent
        return measure(systems, texts, self.effort.max_new_tokens, file, report)

    def rows(self, name: str, systems: Sequence[System], ours: str, sets: Sequence[str] | None = None) -> pd.DataFrame:
        """Return one row per system and set: AAL, median and quartiles of the time per token, and counts.

        ``same_as_ours`` counts prompts with the tokens of the system ``ours``; ``sets`` defaults to all sets.
        """
        parts = []
        for prompt_set in self.sets if sets is None else sets:
            for row in summarise_systems(systems, self.samples(name, systems, prompt_set), ours):
                spread = row["tpot_ms"]
                parts.append(
                    {
                        "set": prompt_set,
                        "system": row["system"],
                        "aal": row["aal"],
                        "tpot_ms": spread["median"],
                        "tpot_low_ms": spread["low"],
                        "tpot_high_ms": spread["high"],
                        "repeats": row["repeats"],
                        "prompts": row["prompts"],
                        "same_as_ours": row["same_as_ours"],
                    }
                )
        return pd.DataFrame(parts)

    @cached_property
    def tree_rows(self) -> pd.DataFrame:
        """One row per set for the plan, plain decoding, and every tree at every budget.

        Columns: set, system, aal, prompts, tpot_ms (median), repeats, same_as_ours; for trees also tree, budget and
        theoretical_speedup.
        """
        parts = []
        for prompt_set in self.sets:
            self.trees.calibrate(self.held_back(prompt_set))
            trees = tree_systems(self.trees, list(TREES), self.budgets)
            rows = self._tree_rows_of(prompt_set, trees)
            parts.append(rows)
        return pd.concat(parts, ignore_index=True)

    def _tree_rows_of(self, prompt_set: str, trees: Sequence[TreeSystem]) -> pd.DataFrame:
        systems: list[System] = [*self.own_systems(), *trees]
        summary = summarise_systems(systems, self.samples("trees", systems, prompt_set), OURS)
        rows = []
        for system, row in zip(systems, summary, strict=True):
            entry = {"set": prompt_set, "system": row["system"], "aal": row["aal"], "prompts": row["prompts"],
                     "tpot_ms": row["tpot_ms"]["median"], "repeats": row["repeats"],
                     "same_as_ours": row["same_as_ours"]}  # fmt: skip
            if isinstance(system, TreeSystem):
                name, _, budget = system.name.rpartition(" ")
                shape = system.arrangement.shape
                spent = drafting_ms(self.trees, system.arrangement) + self.costs.overhead_ms
                iteration = spent + self.costs.verify_ms[shape.verify_width]
                theory = row["aal"] * self.costs.verify_ms[1] / iteration
                entry |= {"tree": name, "budget": int(budget), "theoretical_speedup": theory}
            rows.append(entry)
        return pd.DataFrame(rows)

    def own_systems(self) -> list[System]:
        """Return the plan's decoding and plain decoding as systems."""
        return [EngineSystem(OURS, self.decoder), EngineSystem(PLAIN, self.decoder, is_plain=True)]

    def variant(self, name: str, *, objective: Objective = "latency", with_predictor: bool = True) -> System:
        """Return the plan without model-free drafts, with another objective or the depth from the mean survival."""
        depth_from = self.plan.depth_from if with_predictor else "mean"
        assert self.decoder.learned is not None
        plan = replace(self.plan, objective=objective, depth_from=depth_from)
        return EngineSystem(name, self.decoder, planned_policy(plan, self.decoder.learned, wants_model_free=False))

    def described(self) -> dict[str, Any]:
        """Return the settings on which every measurement depends."""
        return {**pair_settings(self.plan, self.plan.dtype), **vars(self.effort)}

    def caption(self) -> str:
        """Return one line on models, shapes and effort, for the bottom of every figure."""
        effort, shapes = self.effort, self.plan.shapes
        return (
            f"{self.plan.name}, {self.plan.dtype}, {self.plan.target.threads} threads, "
            f"{self.plan.machine.cpu}; {effort.prompts} prompts a set, {effort.max_new_tokens} tokens each; "
            f"depth to {shapes.max_depth}, widths {', '.join(map(str, shapes.draft_widths))}, "
            f"verified {', '.join(map(str, shapes.verify_widths))}"
        )


def open_context(
    plan: str, prompts: Sequence[Path], out: Path, effort: Effort, *, force_machine: bool
) -> FigureContext:
    """Load a plan's models and the prompt sets, which are named by their files.

    Raises:
        YggdrasilError: the plan has no draft model, or plan or prompts are unusable.
    """
    path = resolve_plan(plan, current_machine(), force=force_machine)
    model_drafter(Plan.load(path))  # raises without one
    files = sets_by_name(prompts)
    sets = {name: read_prompts(file, effort.num_prompts, chat=effort.chat) for name, file in files.items()}
    decoder = Decoder.from_plan(path, force_machine=force_machine)
    texts = {name: encode_prompts(decoder, found, effort.max_prompt_tokens) for name, found in sets.items()}
    return FigureContext(decoder, texts, out, effort)


def _silent(_: float) -> None:
    return


def mean_over_sets(frame: pd.DataFrame, by: Sequence[str], values: Mapping[str, str]) -> pd.DataFrame:
    """Aggregate ``values`` (column -> aggregation) over the prompt sets; one row per combination of ``by``."""
    return frame.groupby(list(by), sort=False).agg(dict(values)).reset_index()
