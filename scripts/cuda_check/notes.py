"""The report of a run: one JSON file, rewritten after every measurement, whatever happens later."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor


class DiffersError(AssertionError):
    """Two results that should be equal are not; both are saved."""

    def __init__(self, what: str, ours: Tensor, expected: Tensor) -> None:
        gap = (ours.double().cpu() - expected.double().cpu()).abs().max().item() if ours.numel() else 0.0
        super().__init__(f"{what} differs by up to {gap:.3g}")
        self.tensors = {"ours": ours.detach().cpu().contiguous(), "expected": expected.detach().cpu().contiguous()}


class Report:
    """``report.json``: sections by name, each with its status and results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sections": {}}

    def write(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        temporary.replace(self.path)

    def section(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.content["sections"].setdefault(name, {"status": "running", "results": {}})
        return found


class Notes:
    """Results of one section."""

    def __init__(self, path: Path, section: str, deadline: float, only: frozenset[str] = frozenset()) -> None:
        self._report, self._section = Report(path), section
        self._deadline, self._only = deadline, only
        self.results: dict[str, Any] = self._report.section(section)["results"]

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def note(self, key: str, value: object) -> None:
        self.results[key] = value
        self._report.write()

    def attempt(self, key: str, measure: Callable[[], Any], seconds: float = 5.0, *, always: bool = False) -> Any:
        """Note what ``measure`` returns, or why it failed; skipped where fewer than ``seconds`` are left.

        In a second try what did not fail in the first is left out, unless it is needed ``always``.
        """
        if self._only and key not in self._only and not always:
            return None
        if self.seconds_left < seconds:
            self.note(key, {"skipped": f"{self.seconds_left:.0f} s were left, it may take {seconds:.0f}"})
            return None
        begun = time.monotonic()
        try:
            value = measure()
        except Exception as error:  # noqa: BLE001 - one failure must not lose the rest
            self._save(key, error)
            reason = (str(error).strip() or type(error).__name__)[:2000]
            self.note(key, {"error": f"{type(error).__name__}: {reason}", "traceback": traceback.format_exc()[-4000:]})
            return None
        self.results.setdefault("seconds", {})[key] = round(time.monotonic() - begun, 2)
        self.note(key, value)
        return value

    def _save(self, key: str, error: Exception) -> None:
        """The first differing tensors of a run, as safetensors."""
        path = self._report.path.parent / "differing.safetensors"
        if isinstance(error, DiffersError) and not path.exists():
            from safetensors.torch import save_file

            save_file(error.tensors, path, metadata={"section": self._section, "check": key})


def faults_of(results: dict[str, Any]) -> list[str]:
    return [key for key, value in results.items() if isinstance(value, dict) and "error" in value]
