"""What a plan names: its drafter, and the policy that decides over it."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from yggdrasil.drafters.counts import CountsDrafter, usual_counts
from yggdrasil.drafters.heads.convention import settled
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.drafters.heads.loading import LoadedHead, load_head
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.options import CountsOptions, NGramOptions
from yggdrasil.drafters.protocol import Drafter, FreeDrafter
from yggdrasil.engine.drafted_trees import DepthEvidence
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.errors import YggdrasilError, first_line
from yggdrasil.models.facts import check_same_tokenizer, load_tokenizer
from yggdrasil.models.kept_tensors import open_model
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.source import Source
from yggdrasil.predictor.bundle import Learned
from yggdrasil.scheduling.plan import ModelRef, Plan
from yggdrasil.scheduling.stages import is_head_first
from yggdrasil.tree.objective import least_useful


def planned_policy(
    plan: Plan,
    learned: Learned,
    kind: type[ObjectivePolicy] = ObjectivePolicy,
    *,
    drafts: bool = True,
    wants_free: bool = True,
) -> ObjectivePolicy:
    """The policy that a plan names: its costs, objective and depth source. ``kind`` may decide otherwise with them.

    ``drafts``: there is a drafter that costs passes. ``wants_free``: guesses that cost none may join the drafter's or
    stand in for them.

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
            costs, learned.ratios if drafts else {}, learned.mean_survival, depth, plan.objective,
            is_head_first=is_head_first(plan.stages), wants_free=wants_free,
        )  # fmt: skip
    except ValueError as error:
        raise YggdrasilError(
            f"the predictor {plan.predictor} does not fit the plan {plan.name} ({first_line(error)}); calibrate again"
        ) from error


def planned_drafter(
    plan: Plan, tokenizer: PreTrainedTokenizerBase, target: LoadedModel
) -> LoadedModel | LoadedHead | Drafter | None:
    """The plan's drafter for ``target``; None where all guesses are free."""
    if isinstance(plan.drafter, NGramOptions):
        return NGramDrafter(plan.drafter)
    if isinstance(plan.drafter, CountsOptions):
        return None
    check_fingerprint(plan.drafter, "drafter")
    source = plan.drafter.path()
    if is_head(source):
        head = load_head(Path(source).expanduser(), target, plan.drafter.threads)
        return settled(head, target, plan.target.fingerprint)
    check_same_tokenizer(tokenizer, load_tokenizer(source), (plan.target.path(), source))
    return open_model(source, target.dtype, target.device, plan.drafter.threads)


def planned_free(plan: Plan, folder: Path, stand_in: Drafter | None) -> FreeDrafter | None:
    """What guesses alone or beside the plan's drafter, or beside the one that takes its place.

    What was learned for it lies in ``folder``. An n-gram drafter looks the text up itself: nothing is beside it.
    """
    counts = next((each for each in plan.drafters if isinstance(each, CountsOptions)), None)
    if isinstance(stand_in, NGramDrafter) or (stand_in is None and counts is None):
        return None
    free = usual_counts() if counts is None else CountsDrafter.load(folder, counts)
    free.leave_out_below(least_useful(entry.steps() for entry in plan.costs))
    return free


def check_fingerprint(model: ModelRef, role: str) -> None:
    """Refuse a model that is not there or is not the one of the plan."""
    given = model.path()
    if not Path(given).exists() and Path(given).is_absolute():
        raise YggdrasilError(f"the plan's {role} {given} is not there; restore it or calibrate with its new place")
    if Source.find(given).fingerprint() != model.fingerprint:
        raise YggdrasilError(f"the {role} in {given} has changed since the plan was made; calibrate again")
