"""Builds the drafters and the policy that a plan (the YAML file of a calibration) describes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.facts import check_drafter_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.drafters.heads.convention import with_detected_layers
from yggdrasil.drafters.heads.draft_vocabulary import FILE_NAME, Vocabulary
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.drafters.heads.loading import LoadedHead, load_head
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import Drafter, is_model_free
from yggdrasil.drafters.registry import make_drafter
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter, default_statistics
from yggdrasil.errors import YggdrasilError, first_line
from yggdrasil.native import is_native
from yggdrasil.policy.objective import DepthPrediction, FloatArray, least_useful_probability
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.predictor.bundle import Learned
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.shared import shared_model
from yggdrasil.scheduling.plan import ModelRef, Plan, Shapes
from yggdrasil.scheduling.stages import DEFAULT_ORDER, is_head_first

_OWN_WIDTH, _OWN_MS, _OWN_SURVIVAL = 4, 0.01, 0.5  # initial estimates for a user's drafter


def planned_policy(
    plan: Plan,
    learned: Learned | None,
    kind: type[ObjectivePolicy] = ObjectivePolicy,
    *,
    drafts: bool = True,
    wants_model_free: bool = True,
) -> ObjectivePolicy:
    """Return the policy that chooses tree shapes by the plan's step costs and objective.

    Args:
        learned: depth predictor and acceptance of the drafter; None uses default estimates.
        kind: class of the policy.
        drafts: whether there is a draft model, head or other drafter with a cost.
        wants_model_free: whether model-free drafts may be used.

    Raises:
        YggdrasilError: plan and predictor do not fit each other, or there are costs of widths that the shapes lack.
    """
    drafted, verified = set(plan.shapes.draft_widths), set(plan.shapes.verify_widths)
    if not all(entry.draft_ms.keys() <= drafted and entry.verify_ms.keys() <= verified for entry in plan.costs):
        raise YggdrasilError(f"the plan {plan.name} has costs of widths that its shapes lack; calibrate again")
    costs = {entry.context: entry.steps() for entry in plan.costs}
    ratios, mean_survival = _assumed(plan.shapes, plan.agreement) if drafts else ({}, np.empty(0, dtype=np.float32))
    depth = added_tokens = None
    if drafts and learned is not None:
        ratios, mean_survival = learned.ratios, learned.mean_survival
        added_tokens = learned.added_tokens
        depth = DepthPrediction(learned.depth, learned.reads) if plan.depth_from != "mean" else None
    try:
        return kind(
            costs, ratios, mean_survival, depth, plan.objective,
            is_head_first=is_head_first(plan.stages), wants_model_free=wants_model_free,
            added_tokens=added_tokens,
        )  # fmt: skip
    except ValueError as error:
        raise YggdrasilError(
            f"the predictor {plan.predictor} does not fit the plan {plan.name} ({first_line(error)}); calibrate again"
        ) from error


def _assumed(shapes: Shapes, agreement: Sequence[float]) -> tuple[dict[int, FloatArray], FloatArray]:
    """Return ratios and mean survival of trees that were not measured, as if each were a chain.

    Args:
        agreement: share of drafted tokens that equal the target's, by draft step; further steps have the last share. If
            it is empty, every step has the share 0.5.
    """
    shares = [*agreement[: shapes.max_depth]] or [_OWN_SURVIVAL]
    shares += shares[-1:] * (shapes.max_depth - len(shares))
    depths = np.arange(1, shapes.max_depth + 1)
    fits = np.greater.outer(shapes.verify_widths, depths).T.astype(
        np.float32
    )  # [D, V]: a level is a row beside the root
    levels = np.tril(np.ones((shapes.max_depth, shapes.max_depth), dtype=np.float32))  # by depth budget
    return dict.fromkeys(shapes.draft_widths, levels[:, :, None] * fits), np.cumprod(shares, dtype=np.float32)


class Drafting(NamedTuple):
    """The drafters of a plan, and the plan adapted to them."""

    plan: Plan
    drafter: LoadedModel | LoadedHead | Drafter | None  # not model-free
    model_free: list[Drafter]


def drafting_by(plan: Plan, folder: Path, stand_in: Drafter) -> Drafting:
    """Return the drafters of a plan whose drafter is replaced by ``stand_in``, with the plan adapted to them.

    The plan's model-free drafters stay. N-gram statistics are added if the plan has none and the native library, which
    counts n-grams, is installed. An ``NGramDrafter`` as ``stand_in`` drafts alone. The adapted plan has the default
    schedule and no depth predictor and, for a drafter that is not model-free, at least one draft width.

    Args:
        folder: the plan's predictor, which has n-gram tables.

    Raises:
        YggdrasilError: the plan has no verify width above 1.
    """
    if plan.shapes.verify_widths == (1,):
        raise YggdrasilError(f"the plan {plan.name} decodes plainly alone and verifies no guess; calibrate another")
    # The predictor of the plan's own drafter does not apply to another.
    adapted = replace(plan, stages=DEFAULT_ORDER, depth_from="mean")
    if not is_model_free(stand_in) and not plan.shapes.draft_widths:
        shapes = replace(plan.shapes, draft_widths=(_OWN_WIDTH,), candidates=max(plan.shapes.candidates, _OWN_WIDTH))
        costs = [replace(entry, draft_ms={_OWN_WIDTH: _OWN_MS}) for entry in plan.costs]
        adapted = replace(adapted, shapes=shapes, costs=costs)
    if isinstance(stand_in, NGramDrafter):
        return Drafting(adapted, None, [stand_in])
    beside = planned_model_free(plan, folder)
    if is_native() and not any(isinstance(each, StatisticsDrafter) for each in beside):
        beside = [*beside, _useful(default_statistics(), plan)]
    if is_model_free(stand_in):
        return Drafting(adapted, None, [stand_in, *beside])
    return Drafting(adapted, stand_in, beside)


def planned_drafter(
    plan: Plan, folder: Path, tokenizer: Tokenizer, target: LoadedModel, dtype: str
) -> LoadedModel | LoadedHead | None:
    """Load the plan's draft model or draft head for ``target``; None if the plan has neither.

    Args:
        folder: the plan's predictor, which has the restricted draft vocabulary of a head.
        tokenizer: the target's.
        dtype: arithmetic of the models, "bfloat16" or "float32".

    Raises:
        YggdrasilError: the drafter has changed since the plan was made, or does not fit the target.
    """
    if plan.drafter is None:
        return None
    check_fingerprint(plan.drafter, "drafter")
    source = plan.drafter.path()
    if is_head(source):
        head = load_head(expanded(source), target, plan.drafter.threads, planned_vocabulary(plan, folder))
        return with_detected_layers(head, target, plan.target.fingerprint)
    check_drafter_tokenizer(tokenizer, plan.target.path(), source)
    weights = plan.weights_in(dtype, plan.drafter)
    return shared_model(
        Source.find(source), target.dtype, target.device, plan.drafter.threads, weights,
        is_described=target.is_described,
    )  # fmt: skip


def planned_vocabulary(plan: Plan, folder: Path) -> Vocabulary | None:
    """Load the restricted draft vocabulary of the plan's draft head from ``folder``, the plan's predictor.

    The result is None if the plan has no draft head, or a head that drafts all tokens.

    Raises:
        ArtifactError: the file is missing or damaged.
        YggdrasilError: the file is from another calibration.
    """
    if plan.draft_vocabulary is None:
        return None
    vocabulary = Vocabulary.load(folder / FILE_NAME)
    if len(vocabulary.tokens) != plan.draft_vocabulary:
        raise YggdrasilError(
            f"{shown(folder / FILE_NAME)} holds {len(vocabulary.tokens)} tokens, and the plan {plan.name} drafts among "
            f"{plan.draft_vocabulary}; calibrate again"
        )
    return vocabulary


def planned_model_free(plan: Plan, folder: Path) -> list[Drafter]:
    """Return the plan's model-free drafters in its order.

    ``folder``, the plan's predictor, has their tables and scorers.

    Raises:
        YggdrasilError: a file is missing or damaged, or a user's class cannot be imported.
    """
    return [
        _useful(StatisticsDrafter.load(folder, each), plan)
        if isinstance(each, StatisticsOptions)
        else make_drafter(each)
        for each in plan.model_free
    ]


def _useful(counts: StatisticsDrafter, plan: Plan) -> StatisticsDrafter:
    counts.leave_out_below(least_useful_probability(entry.steps() for entry in plan.costs))
    return counts


def check_fingerprint(model: ModelRef, role: str) -> None:
    """Check that the checkpoint of a plan's model exists and has not changed since the plan was made.

    ``role`` ("target" or "drafter") names the model in messages.

    Raises:
        YggdrasilError: the checkpoint is missing, or its fingerprint differs from the plan's.
    """
    given = model.path()
    if not Path(given).exists() and Path(given).is_absolute():
        raise YggdrasilError(f"the plan's {role} {given} is not there; restore it or calibrate with its new place")
    if Source.find(given).fingerprint() != model.fingerprint:
        raise YggdrasilError(f"the {role} in {given} has changed since the plan was made; calibrate again")
