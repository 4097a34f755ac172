"""``yggdrasil bench --tree``: compares tree algorithms on our engine at equal verify budgets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from yggdrasil.bench.policies import plan_ablations
from yggdrasil.bench.record import model_drafter, pair_settings
from yggdrasil.bench.spread import describe
from yggdrasil.bench.store import SampleFile, measure
from yggdrasil.bench.systems import (
    EngineSystem,
    System,
    encode_prompts,
    equality,
    judge_by_replay,
    summarise_systems,
)
from yggdrasil.bench.trees import TREES, TreeBench, check_names, tree_systems
from yggdrasil.cli.progress import PhaseProgress, wide_console
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import Prompt

OURS, PLAIN, ALL = "yggdrasil, by plan", "yggdrasil, plain compiled", "all"


def chosen_trees(names: Sequence[str]) -> list[str]:
    """Return the given tree names, or all for "all". Raises YggdrasilError for an unknown name."""
    chosen = list(TREES) if ALL in names else list(dict.fromkeys(names))
    check_names(chosen)
    return chosen


def compare_trees(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    *,
    names: Sequence[str],
    budgets: Sequence[int],
    held_back: int,
    out: Path | None,
) -> None:
    """Decode the prompts with every tree at every budget, except the last ``held_back``, which calibrate static trees.

    ``settings`` has everything else that affects the result, including ``max_new_tokens`` and ``max_prompt_tokens``.
    """
    if not 0 < held_back < len(prompts):
        raise YggdrasilError(
            f"--held-back {held_back} of {len(prompts)} prompts leaves none to evaluate or to calibrate on; give more"
        )
    assert decoder.plan is not None
    model_drafter(decoder.plan)  # raises without one
    assert decoder.learned is not None
    ablations = plan_ablations(decoder.plan, decoder.learned) if ALL in names else {}
    texts = encode_prompts(decoder, prompts, settings["max_prompt_tokens"])
    evaluated = dict(list(texts.items())[:-held_back])
    bench = TreeBench(decoder, budgets, decoder.plan.costs[0].steps())
    with PhaseProgress() as progress:
        report = progress.phase(f"measuring acceptance on {held_back} prompts")
        acceptance = bench.calibrate(list(texts.values())[-held_back:])
        report(1.0)
        systems: list[System] = [
            EngineSystem(OURS, decoder),
            EngineSystem(PLAIN, decoder, is_plain=True),
            *(EngineSystem(f"yggdrasil, {name}", decoder, policy) for name, policy in ablations.items()),
            *tree_systems(bench, chosen_trees(names), budgets),
        ]
        described = {
            **pair_settings(decoder.plan, settings["dtype"]),
            **settings,
            "backend": decoder.assembly.target.backend,
            "held_back": held_back,
            "rank_acceptance": list(acceptance),
            "systems": [system.name for system in systems],
        }
        file = SampleFile(out, described)
        report = progress.phase(f"{len(systems)} trees, {len(evaluated)} prompts")
        is_timed = decoder.assembly.target.backend != "eager"
        samples = measure(systems, evaluated, settings["max_new_tokens"], file, report, is_timed=is_timed)
    rows = summarise_systems(systems, samples, OURS, judge_by_replay(decoder, texts))
    file.save(rows)
    show_systems(rows)


def show_systems(rows: Sequence[dict[str, Any]]) -> None:
    """Print one row per system."""
    titles = "system|as its plain|as ours|AAL|TPOT ms (quartiles)|over ours (quartiles)|in all|repeats"
    table = Table(*titles.split("|"))
    for row in rows:
        equal = [equality(row, key) for key in ("same_as_plain", "same_as_ours")]
        aal, total = (f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("aal", "total_ratio_to_ours"))
        times = [describe(row["tpot_ms"], 3), describe(row["ratio_to_ours"], 3)]
        table.add_row(row["system"], *equal, aal, *times, total, f"{row['repeats']:.0%}")
    wide_console().print(table)
