"""The plan of a model, found by the model's content among all plans of this machine."""

import re
from collections.abc import Sequence
from pathlib import Path

from yggdrasil.artifacts import current_machine, list_plans
from yggdrasil.artifacts.gguf import is_gguf
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.registry import is_model_free_name, names_of
from yggdrasil.drafters.shipped_assets import whole_name
from yggdrasil.engine.loading import DtypeName
from yggdrasil.errors import ArtifactError
from yggdrasil.scheduling.plan import DeviceName, Plan


def find_plan(
    model: Source, drafters: Sequence[str] | None, dtype: DtypeName | None, device: DeviceName | None = None
) -> Path | None:
    """The plan for this machine that decodes with this model; None where there is none.

    With ``drafters`` it has all of them, or a calibration left them out since they do not pay, and no other model.
    Without, its drafters do not matter. Without ``device`` any will do. A calibrated plan is preferred to a provisional
    one, then one that reads a file's blocks as they are, then the newest.
    """
    digits = model.fingerprint()
    wanted = {
        name if is_model_free_name(name) else Source.find(whole_name(name)).fingerprint() for name in drafters or ()
    }
    fitting = []
    for path, plan in _plans_of(digits):
        if dtype not in (None, plan.dtype) or device not in (None, plan.device) or _is_rounded(plan):
            continue
        is_meant = not wanted or _model_of(plan) <= wanted <= _considered(plan) | names_of(plan.model_free)
        if plan.is_provisional:  # one that was made for drafters that were named once is found for these alone
            is_meant = _named_for(path) == automatic_name(model, drafters, plan.dtype, plan.device)
        if is_meant:
            rank = (not plan.is_provisional, plan.target.weights == "file", path.stat().st_mtime_ns)
            fitting.append((*rank, path))
    return max(fitting)[-1] if fitting else None


def _plans_of(fingerprint: str) -> list[tuple[Path, Plan]]:
    """The plans of a target that fit this machine. Files that do not mention the fingerprint are not parsed."""
    machine, found = current_machine(), list[tuple[Path, Plan]]()
    for entry in list_plans():
        if not entry.fits(machine) or not entry.mentions(fingerprint):
            continue
        try:
            plan = Plan.load(entry.path)
        except ArtifactError:
            continue
        if plan.target.fingerprint == fingerprint:
            found.append((entry.path, plan))
    return found


def _named_for(path: Path) -> str:
    return path.parent.name


def _is_rounded(plan: Plan) -> bool:
    """Whether a model of the plan is rounded when it is loaded, and so differs from the one that was named."""
    models = [plan.target] if plan.drafter is None else [plan.target, plan.drafter]
    return any(model.weights not in ("full", "file") for model in models)


def _model_of(plan: Plan) -> set[str]:
    """The fingerprint of the model that drafts."""
    return set() if plan.drafter is None else {plan.drafter.fingerprint}


def _considered(plan: Plan) -> set[str]:
    """The fingerprints of the model that drafts and of one that did not pay."""
    return _model_of(plan) | (set() if plan.left_out is None else {plan.left_out.drafter.fingerprint})


def plan_name(model: str | Path) -> str:
    """The name of a model's plan unless another is given: the last part of the model's path, as names may be."""
    path = expanded(model)
    last = path.stem if is_gguf(path) else path.resolve().name if path.exists() else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip(".-") or "model"


def automatic_name(model: Source, drafters: Sequence[str] | None, dtype: DtypeName, device: DeviceName) -> str:
    """The name of the provisional plan of a model, one for every choice of drafters and device."""
    named = "".join(f"-{plan_name(drafter)}" for drafter in drafters or ())
    return f"{plan_name(model.given)}-{model.fingerprint()[:8]}-{dtype}{named}{'' if device == 'cpu' else f'-{device}'}"
