"""What a plan names: its drafter, and the policy that decides over it."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from yggdrasil.drafters.counts import CountsDrafter, usual_counts
from yggdrasil.drafters.heads.loading import LoadedHead, load_head
from yggdrasil.drafters.heads.settings import is_head
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.options import CountsOptions, NGramOptions
from yggdrasil.drafters.protocol import Drafter, FreeDrafter
from yggdrasil.engine.free_policy import FreePolicy
from yggdrasil.engine.objective_policy import DepthEvidence, ObjectivePolicy
from yggdrasil.engine.policy import Policy
from yggdrasil.errors import YggdrasilError, first_line
from yggdrasil.models.facts import check_same_tokenizer, load_tokenizer
from yggdrasil.models.kept_tensors import open_model
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.source import Source
from yggdrasil.predictor.bundle import Learned
from yggdrasil.scheduling.plan import ModelRef, Plan
from yggdrasil.scheduling.stages import is_head_first


def planned_policy(
    plan: Plan, learned: Learned, kind: type[ObjectivePolicy] = ObjectivePolicy, *, wants_free: bool = True
) -> ObjectivePolicy:
    """The policy that a plan names: its costs, objective and depth source. ``kind`` may decide otherwise with them.

    ``wants_free``: guesses that cost no pass may join the drafter's or stand in for them.

    Raises:
        YggdrasilError: the plan's parts, or its predictor, are not of one calibration.
    """
    drafted, verified = set(plan.shapes.draft_widths), set(plan.shapes.verify_widths)
    if not all(entry.draft_ms.keys() <= drafted and entry.verify_ms.keys() <= verified for entry in plan.costs):
        raise YggdrasilError(f"the plan {plan.name} has costs of widths that its shapes lack; calibrate again")
    costs = {entry.context: entry.steps() for entry in plan.costs}
    depth = DepthEvidence(learned.depth, learned.reads) if plan.depth_from != "mean" else None
    try:
        return kind(
            costs, learned.ratios, learned.mean_survival, depth, plan.objective,
            is_head_first=is_head_first(plan.stages), wants_free=wants_free,
        )  # fmt: skip
    except ValueError as error:
        raise YggdrasilError(
            f"the predictor {plan.predictor} does not fit the plan {plan.name} ({first_line(error)}); calibrate again"
        ) from error


def own_policy(plan: Plan, learned: Learned) -> Policy:
    """The policy over the plan's own drafter.

    Raises:
        YggdrasilError: as ``planned_policy``.
    """
    policy = planned_policy(plan, learned)
    if not isinstance(plan.drafter, CountsOptions):
        return policy
    return FreePolicy({entry.context: entry.steps() for entry in plan.costs}, plan.shapes.max_depth, plan.objective)


def planned_drafter(
    plan: Plan, folder: Path, tokenizer: PreTrainedTokenizerBase, target: LoadedModel
) -> LoadedModel | LoadedHead | Drafter:
    """The plan's drafter for ``target``; what was learned for it lies in ``folder``."""
    if isinstance(plan.drafter, NGramOptions):
        return NGramDrafter(plan.drafter)
    if isinstance(plan.drafter, CountsOptions):
        return CountsDrafter.load(folder, plan.drafter)
    check_fingerprint(plan.drafter, "drafter")
    source = plan.drafter.path()
    if is_head(source):
        return load_head(Path(source), target, plan.drafter.threads)
    check_same_tokenizer(tokenizer, load_tokenizer(source), (plan.target.path(), source))
    return open_model(source, target.dtype, target.device, plan.drafter.threads)


def planned_free(plan: Plan, folder: Path, stand_in: Drafter | None) -> FreeDrafter | None:
    """What guesses beside the plan's drafter, or beside the one that takes its place.

    An n-gram drafter looks the text up itself: nothing is beside it.
    """
    if stand_in is None:
        return None if plan.beside is None else CountsDrafter.load(folder, plan.beside)
    counts = next((each for each in plan.drafters if isinstance(each, CountsOptions)), None)
    if isinstance(stand_in, NGramDrafter):
        return None
    return usual_counts() if counts is None else CountsDrafter.load(folder, counts)


def check_fingerprint(model: ModelRef, role: str) -> None:
    """Refuse a model that is not there or is not the one of the plan."""
    given = model.path()
    if not Path(given).exists() and Path(given).is_absolute():
        raise YggdrasilError(f"the plan's {role} {given} is not there; restore it or calibrate with its new place")
    if Source.find(given).fingerprint() != model.fingerprint:
        raise YggdrasilError(f"the {role} in {given} has changed since the plan was made; calibrate again")
