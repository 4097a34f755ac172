"""Stores the samples of a comparison after every prompt, so that an interrupted run can resume."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_systems import WARM_TOKENS, Sample, System, run_systems

from yggdrasil.artifacts import parse_json, write_atomic
from yggdrasil.bench.record import provenance, public_source
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.scheduling.plan import ModelRef, Plan


def model_drafter(plan: Plan) -> ModelRef:
    """Return the plan's draft model, which rivals use too. Raises YggdrasilError if the plan has none."""
    if not isinstance(plan.drafter, ModelRef) or is_head(plan.drafter.path()):
        raise YggdrasilError(f"the plan {plan.name} drafts without a draft model; rivals need a plan with one")
    return plan.drafter


def pair_settings(plan: Plan, dtype: str) -> dict[str, Any]:
    """Return models, threads, dtype, weights and a digest of the plan of a result; drafter None without a model."""
    drafter = plan.drafter if isinstance(plan.drafter, ModelRef) else None
    return {
        "plan": plan.name,
        "target": public_source(plan.target.source),
        "drafter": public_source(drafter.source) if drafter else None,
        "threads": {"target": plan.target.threads, "drafter": drafter.threads if drafter else None},
        "dtype": dtype,
        "weights": {"target": plan.target.weights, "drafter": drafter.weights if drafter else None},
        "calibration": hashlib.sha256(repr(plan).encode()).hexdigest()[:16],  # tells plans of the same name apart
    }


class SampleFile:
    """The samples of one set of settings; without a path they are only in memory."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Load the file if it exists.

        Raises:
            YggdrasilError: it is damaged, or its settings differ.
        """
        self._path = path
        self._settings = json.loads(json.dumps({**settings, "warm_tokens": WARM_TOKENS}))
        self.samples: list[Sample] = []
        self._prompts: dict[str, str] = {}  # id -> digest of its tokens
        if path is None or not path.exists():
            return
        try:
            record = parse_json(path.read_bytes())
            found, samples = dict(record["settings"]), [Sample.from_dict(values) for values in record["samples"]]
            prompts = dict(record.get("prompts", {}))
        except (ValueError, LookupError, TypeError, ArtifactError) as error:
            raise YggdrasilError(f"{path} holds no comparison; remove it or name another file") from error
        if found != self._settings:
            changed = sorted(key for key in found.keys() | self._settings if found.get(key) != self._settings.get(key))
            raise YggdrasilError(
                f"{path} was measured with other settings ({', '.join(changed)}); remove it or name another file"
            )
        self.samples, self._prompts = samples, prompts

    def begin(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """Register ``prompts`` (id -> tokens). Raises YggdrasilError if stored samples are of other tokens."""
        measured = {sample.prompt for sample in self.samples}
        for prompt, tokens in prompts.items():
            digest = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]
            if prompt in measured and self._prompts.get(prompt) != digest:
                raise YggdrasilError(
                    f"{self._path} was measured on other prompts ({prompt} is not what it was); remove it or name "
                    "another file"
                )
            self._prompts[prompt] = digest

    def add(self, samples: Sequence[Sample]) -> None:
        """Add the samples of one prompt and save the file."""
        self.samples.extend(samples)
        self.save([])

    def save(self, summary: Sequence[Mapping[str, Any]]) -> None:
        """Write provenance, settings, ``summary`` and all samples to the file."""
        if self._path is None:
            return
        record = {
            **provenance(),
            "settings": self._settings,
            "prompts": self._prompts,
            "summary": list(summary),
            "samples": [sample.as_dict() for sample in self.samples],
        }
        write_atomic(self._path, (json.dumps(record, indent=1) + "\n").encode())


def measure(
    systems: Sequence[System],
    prompts: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    file: SampleFile,
    report: Callable[[float], None],
    *,
    is_timed: bool = True,
    warm_up: bool = True,
) -> list[Sample]:
    """Measure ``systems`` on ``prompts`` (id -> tokens) and return the samples; those in ``file`` are reused.

    ``is_timed`` False skips warm-up and pauses, for token comparisons only. ``warm_up`` False is for systems that have
    decoded in this process before. ``report`` gets the fraction done.
    """
    file.begin(prompts)
    names = {system.name for system in systems}
    done = {prompt for prompt in prompts if names <= {s.system for s in file.samples if s.prompt == prompt}}
    left = {prompt: tokens for prompt, tokens in prompts.items() if prompt not in done}
    finished = len(done)

    def note(_: str, samples: list[Sample]) -> None:
        nonlocal finished
        finished += 1
        file.add(samples)
        report(finished / len(prompts))

    if left:
        run_systems(systems, left, max_new_tokens, note, is_timed=is_timed, warm_up=warm_up)
    report(1.0)
    return [sample for sample in file.samples if sample.prompt in prompts and sample.system in names]
