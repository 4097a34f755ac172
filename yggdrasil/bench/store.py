"""Samples of a comparison on disk: written after every prompt, so that an interrupted run goes on where it stopped."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from yggdrasil.artifacts import parse_json, write_atomic
from yggdrasil.bench.record import provenance
from yggdrasil.bench.systems import WARM_TOKENS, Sample, System, run_systems
from yggdrasil.errors import ArtifactError, YggdrasilError


class SampleFile:
    """Samples under one set of settings; without a path they are only kept in memory."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Take up what the file holds.

        Raises:
            YggdrasilError: it is damaged, or belongs to other settings.
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
        """Samples of ``prompts`` (id -> tokens) follow; YggdrasilError where those at hand are of other texts."""
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
        """Keep the samples of one prompt."""
        self.samples.extend(samples)
        self.save([])

    def save(self, summary: Sequence[Mapping[str, Any]]) -> None:
        """Write everything: where and with what it was measured, the settings, ``summary``, every sample."""
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
    """Samples of ``systems`` on ``prompts`` (id -> tokens), those that ``file`` already holds not measured again.

    Where times are of no interest, nothing is warmed up and nothing settles. Without ``warm_up`` the systems have
    decoded in this process before.
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
