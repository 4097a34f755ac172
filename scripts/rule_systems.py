"""Every acceptance rule and exactness mode as a system (``bench_systems.py``): decoded in turns on one engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bench_systems import EngineSystem, Sample, summarise_systems

from yggdrasil.acceptance.rules import DRAWN_KINDS
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import OFF, Exactness, Speculation
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.host_acceptance import fitting_expansion
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

SEED = 0
PLAIN, BY_PLAN, K_ARY = "off", "match, by plan", "match, k-ary"
RULES = {
    PLAIN: OFF,
    BY_PLAN: Speculation(),
    "match": Speculation(),
    K_ARY: Speculation(expansion=(2, 1, 1)),
    "leviathan": Speculation(rule="leviathan"),
    "specinfer": Speculation(rule="specinfer"),
    "sequoia": Speculation(rule="sequoia"),
    "typical": Speculation(rule="typical"),
    "relaxed": Speculation(rule="relaxed"),
}
FAST, FIXED_PLAIN = "fast", "off, fixed-width"
MODES = {
    PLAIN: OFF,
    FAST: Speculation(),
    "strict": Speculation(exactness="strict"),
    FIXED_PLAIN: Speculation(rule="off", exactness="fixed-width"),
    "fixed-width": Speculation(exactness="fixed-width"),
}
EQUAL_TO_PLAIN: tuple[Exactness, ...] = ("strict", "fixed-width")  # modes that must equal plain decoding


class Group(NamedTuple):
    """Systems at one temperature, and the one that they are compared with."""

    temperature: float
    reference: str  # name of the system that ratios are taken against
    systems: list[EngineSystem]


def rule_group(decoder: Decoder, temperature: float) -> Group:
    """Return all acceptance rules at ``temperature``, compared with plain decoding.

    Rules are compared on one small tree in every iteration, except "match, by plan", which uses the plan's policy.
    Rules that need a draft model or a drafter are left out without one.
    """
    shapes, has_model = decoder.assembly.shapes, decoder.assembly.has_draft_model
    has_drafter = decoder.assembly.engine.drafter is not None
    always = FixedPolicy(_small_tree(shapes))
    family = f"T={temperature:g}"
    sampling = SamplingParams(temperature=temperature, seed=SEED)
    systems = [
        EngineSystem(
            f"{name}, {family}", decoder, None if name == BY_PLAN else always, is_plain=name == PLAIN,
            speculation=_in_room(way, shapes), sampling=sampling, family=family,
        )
        for name, way in RULES.items()
        if (has_drafter or name in (PLAIN, BY_PLAN))
        and (has_model or not (way.expansion or way.rule_name in DRAWN_KINDS))
    ]  # fmt: skip
    return Group(temperature, f"{PLAIN}, {family}", systems)


def mode_group(decoder: Decoder, tolerance: float | None = None) -> Group:
    """Return all exactness modes at temperature 0, compared with "fast".

    ``tolerance`` is in logits; None takes the plan's.

    Raises:
        YggdrasilError: the plan's only verify width is 1.
    """
    widths = decoder.assembly.shapes.verify_widths
    if widths[-1] < 2:
        raise YggdrasilError(
            "the plan's steps verify one token alone, so there is nothing to compare; give another plan"
        )
    width = OFF.fixed_width if OFF.fixed_width in widths else widths[-1]
    systems = [
        EngineSystem(
            name, decoder, is_plain=way.rule == "off", family=_kernels(way),
            speculation=replace(way, tolerance=tolerance, fixed_width=width),
        )
        for name, way in MODES.items()
    ]  # fmt: skip
    return Group(0.0, FAST, systems)


def summarise_group(group: Group, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the rows of ``summarise_systems`` with temperature, ``lossless`` and the counts of near ties."""
    names = {system.name for system in group.systems}
    own = [sample for sample in samples if sample.system in names]
    rows = summarise_systems(group.systems, own, group.reference)
    for row in rows:
        reports = [sample.continuation.decoding for sample in own if sample.system == row["system"]]
        known = [report for report in reports if report is not None]
        row |= {"temperature": group.temperature, "lossless": all(report["lossless"] for report in known)}
        for count in ("near_ties", "width_one_passes", "flips"):
            row[count] = sum(report[count] or 0 for report in known)
        row["verify_decode_mismatches"] = row["prompts"] - row["same_as_plain"]
    return rows


def _small_tree(shapes: Shapes) -> TreeShape:
    width, depth = next((width for width in shapes.draft_widths if width > 1), 1), min(3, shapes.max_depth)
    wider = [verified for verified in shapes.verify_widths if verified > width * depth]
    return TreeShape(width, depth, wider[0] if wider else shapes.verify_widths[-1])


def _in_room(way: Speculation, shapes: Shapes) -> Speculation:
    return way if way.expansion is None else replace(way, expansion=fitting_expansion(way.expansion, shapes))


def _kernels(way: Speculation) -> str:
    """Return the family of a mode: fixed-width modes are compared with plain decoding at the same padded width."""
    return "fixed-width" if way.exactness == "fixed-width" else "width 1"
