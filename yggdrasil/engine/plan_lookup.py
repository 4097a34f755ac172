"""The plan of a model, found by the model's content among all plans of this machine."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from yggdrasil.artifacts import current_machine, list_plans
from yggdrasil.artifacts.gguf import is_gguf
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.registry import is_model_free_name, names_of
from yggdrasil.drafters.shipped_assets import whole_name
from yggdrasil.engine.loading import DtypeName
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.scheduling.plan import DeviceName, Plan

_PLAN_SUFFIXES = (".yaml", ".yml")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PLAN_START = b"kind: plan"
_MOST = 8  # names that a sentence lists


def is_plan(given: str | Path) -> bool:
    """Whether ``given`` names a plan; else it names a model: a folder, a .gguf file or a hub id.

    Raises:
        YggdrasilError: it is a file that is neither, or there is nothing of that name.
    """
    path, text = expanded(given), str(given)
    if path.is_file():
        return not is_gguf(path) and _is_plan_file(path, text)
    if path.suffix in _PLAN_SUFFIXES:
        raise YggdrasilError(f"there is no plan file {text}; {_there_is(path)}")
    if path.suffix.lower() == ".gguf":
        raise YggdrasilError(f"there is no file {text}; {_there_is(path)}")
    if path.name != text:  # a path, or a hub id, which the hub knows
        if not path.exists() and (path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1):
            raise YggdrasilError(f"there is no folder or file {text}; {_there_is(path)}")
        return False
    if _has_plan(text):
        return True
    if path.is_dir():
        return False
    raise YggdrasilError(f"there is no plan, folder or file {text}; {_there_is(path)}")


def _is_plan_file(path: Path, text: str) -> bool:
    if path.suffix.lower() in _WEIGHT_SUFFIXES:
        raise YggdrasilError(f"{text} is one file of a checkpoint; give its folder, {path.parent}")
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise YggdrasilError(f"{text} cannot be read ({error.strerror}); check its permissions") from error
    if path.suffix in _PLAN_SUFFIXES or start.startswith(_PLAN_START):
        return True
    raise YggdrasilError(
        f"{text} is neither a model nor a plan; give a checkpoint folder, a .gguf file, a hub id (owner/name) or a "
        "plan's .yaml file"
    )


def _has_plan(name: str) -> bool:
    try:
        return bool(list_plans(name))
    except ArtifactError:  # nothing that a plan may be called
        return False


def _there_is(path: Path) -> str:
    """The names that could be meant: model files in the same folder, and plans."""
    folder = path.parent
    files = sorted(file.name for file in folder.glob("*.gguf")) if folder.is_dir() else []
    plans = sorted({entry.name for entry in list_plans()})
    near = get_close_matches(path.name, [*files, *plans], n=1)
    hint = [f"did you mean {near[0]}?"] if near else []
    listed = [f"{what}: {_some(names)}" for what, names in (("model files there", files), ("plans", plans)) if names]
    return "; ".join([*hint, *listed, "a model is a folder, a .gguf file or a hub id (owner/name)"])


def _some(names: list[str]) -> str:
    more = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")


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
        is_meant = not wanted or _model_of(plan) <= wanted <= _considered(plan) | names_of(plan.free)
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
