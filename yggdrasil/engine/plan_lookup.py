"""Finds the plan (the YAML file of a calibration) of a model on this machine, by the model's fingerprint."""

import re
from collections.abc import Sequence
from pathlib import Path

from yggdrasil.artifacts import current_machine, list_plans
from yggdrasil.artifacts.gguf import is_gguf
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.registry import is_model_free_name, names_of
from yggdrasil.drafters.shipped_assets import resolve_shipped_head
from yggdrasil.engine.loading import DtypeName
from yggdrasil.errors import ArtifactError
from yggdrasil.native import is_native
from yggdrasil.scheduling.plan import DeviceName, Plan

USUAL_DTYPE: DtypeName = "bfloat16"  # of a first use


def find_plan(
    model: Source, drafters: Sequence[str] | None, dtype: DtypeName | None, device: DeviceName | None = None
) -> Path | None:
    """Return the path of the best plan for a model on this machine; None if there is none.

    Calibrated plans are preferred to provisional ones, then plans that use a GGUF file's quantised blocks as they are,
    then newer ones. Plans whose loading quantises weights are never returned, because this changes the output.

    Args:
        drafters: names of drafters. A calibrated plan must have all of them, or its calibration must have left them out
            as not profitable; it must have no other draft model. A provisional plan must have been made for exactly
            these, in this order. If None or empty, the plan may be any calibrated plan, or a provisional plan that was
            made without named drafters.
        dtype: dtype that the plan must have; None accepts any for a calibrated plan, bfloat16 for a provisional one.
        device: device that the plan must have; None accepts any.

    Raises:
        YggdrasilError: ``drafters`` names a shipped head that the package does not have.
    """
    digits = model.fingerprint()
    wanted = {
        name if is_model_free_name(name) else Source.find(resolve_shipped_head(name)).fingerprint()
        for name in drafters or ()
    }
    fitting = []
    for path, plan in _plans_of(digits):
        if dtype not in (None, plan.dtype) or device not in (None, plan.device) or _is_rounded(plan):
            continue
        is_meant = not wanted or _model_of(plan) <= wanted <= _considered(plan) | names_of(plan.model_free)
        if plan.is_provisional:  # must have been created for the same drafters and dtype
            is_meant = path.parent.name == automatic_name(model, drafters, dtype or USUAL_DTYPE, plan.device)
            is_meant = is_meant and _model_of(plan) <= wanted  # a head may have been trained since
        if is_meant:
            rank = (not plan.is_provisional, plan.target.weights == "file", path.stat().st_mtime_ns)
            fitting.append((*rank, path))
    return max(fitting)[-1] if fitting else None


def _plans_of(fingerprint: str) -> list[tuple[Path, Plan]]:
    """Return (path, plan) of a target's plans for this machine. Files without the fingerprint are not parsed."""
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


def _is_rounded(plan: Plan) -> bool:
    """Return whether loading a model of the plan quantises its weights, which changes its output."""
    models = [plan.target] if plan.drafter is None else [plan.target, plan.drafter]
    return any(model.weights not in ("full", "file") for model in models)


def _model_of(plan: Plan) -> set[str]:
    """Return the fingerprint of the draft model or head, as a set; empty if there is none."""
    return set() if plan.drafter is None else {plan.drafter.fingerprint}


def _considered(plan: Plan) -> set[str]:
    """Return the fingerprints of the plan's draft model and of the draft model that its calibration left out."""
    return _model_of(plan) | (set() if plan.left_out is None else {plan.left_out.drafter.fingerprint})


def plan_name(model: str | Path) -> str:
    """Return the default name of a model's plan: the last part of its path or hub id.

    A GGUF file loses its suffix. Characters other than letters, digits, dots, underscores and dashes become dashes.
    """
    path = expanded(model)
    last = path.stem if is_gguf(path) else path.resolve().name if path.exists() else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip(".-") or "model"


def automatic_name(model: Source, drafters: Sequence[str] | None, dtype: DtypeName, device: DeviceName) -> str:
    """Return the name of the provisional plan that a model's first use makes for these drafters, dtype and device.

    The name joins the model's ``plan_name``, the first 8 digits of its fingerprint, dtype, drafters, and a device other
    than "cpu" by dashes. The order of ``drafters`` counts; None and empty are the same. On a CPU without the native
    library, "pytorch" follows, because weights and step costs differ there.
    """
    named = "".join(f"-{plan_name(drafter)}" for drafter in drafters or ())
    name = f"{plan_name(model.given)}-{model.fingerprint()[:8]}-{dtype}{named}"
    if device != "cpu":
        return f"{name}-{device}"
    return name if is_native() else f"{name}-pytorch"
