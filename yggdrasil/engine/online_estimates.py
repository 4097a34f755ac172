"""Refines the estimates of a provisional plan while decoding, and stores them for later processes.

Step costs are written to the plan's file. The policy's acceptance estimates are written to a small JSON file next to
it, which records model, drafter and machine.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from yggdrasil.artifacts import shown, write_atomic
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import ArtifactError
from yggdrasil.policy.costs import lower_envelope
from yggdrasil.scheduling.plan import Costs, Plan

VERSION = 2
PRIOR_PASSES = 64.0  # number of timed passes as which a stored cost counts
SECONDS = 30.0  # between writes; the last is when the decoder is deleted
BUSY = 0.6  # share of the timed costs below which passes show that the machine was busy when it timed them
LEAST_PASSES = 16  # timed passes that a request needs to show this


def refined_costs(costs: Costs, trace: Trace) -> Costs:
    """Return the step costs ``costs``, in milliseconds, averaged with the target passes that ``trace`` has timed.

    A verify width (rows of a pass) with n timed passes gets the mean of its stored cost, counted 64 times, and of the n
    times. The costs of drafting and of widths without passes are multiplied by the factor, new over stored cost, that
    all passes together give in the same way. Last, a width that costs more than a wider one gets the wider one's cost,
    because the wider pass can run its rows too. Without timed passes, ``costs`` itself is returned.
    """
    ratios = _ratios(costs, trace)
    if not ratios:
        return costs
    shift = _moved(*_mean(ratios, trace))
    factors = {
        width: _moved(ratios[width], trace.passes[width]) if width in ratios else shift for width in costs.verify_ms
    }
    moved = {width: ms * factors[width] for width, ms in costs.verify_ms.items()}
    verify_ms = {width: ms for width, (ms, _) in lower_envelope(moved).items()}
    plain_ms = max(costs.plain_ms - costs.verify_ms[1], 0.0) + verify_ms[1]
    draft_ms = {width: ms * shift for width, ms in costs.draft_ms.items()}
    return replace(
        costs, verify_ms=verify_ms, plain_ms=plain_ms, draft_ms=draft_ms, head_ms=costs.head_ms * shift
    )  # fmt: skip


def _ratios(costs: Costs, trace: Trace) -> dict[int, float]:
    """Return, by verify width, the mean time of the passes of ``trace`` divided by their cost."""
    return {
        width: trace.passes_ns[width] / 1e6 / count / costs.verify_ms[width]
        for width, count in trace.passes.items()
        if width in costs.verify_ms and count
    }


def _mean(ratios: Mapping[int, float], trace: Trace) -> tuple[float, int]:
    """Return the mean of ``ratios``, weighted by the passes of each width, and the number of passes."""
    passes = sum(trace.passes[width] for width in ratios)
    return sum(trace.passes[width] * ratio for width, ratio in ratios.items()) / passes, passes


def _moved(ratio: float, passes: int) -> float:
    return (PRIOR_PASSES + passes * ratio) / (PRIOR_PASSES + passes)


class OnlineEstimates:
    """Refiner of the provisional plan in the file ``path``: updates it after each request and writes it periodically.

    ``state`` returns the policy's estimates (latency scales, acceptance, regret budgets) as a JSON-compatible mapping.
    """

    def __init__(self, path: Path, plan: Plan, state: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._plan, self._state = path, plan, state
        self._is_new, self._written = False, -SECONDS
        self._timed, self._was_busy = plan.costs[0], False

    def add(self, trace: Trace) -> None:
        """Update the plan's step costs by the target passes of a finished request.

        The plan is written if the last write was 30 s ago or more. A request without iterations changes nothing.
        """
        if not trace.iterations:
            return
        self._plan = replace(self._plan, costs=[refined_costs(costs, trace) for costs in self._plan.costs])
        if ratios := _ratios(self._timed, trace):
            ratio, passes = _mean(ratios, trace)
            self._was_busy |= ratio < BUSY and passes >= LEAST_PASSES
        self._is_new = True
        if monotonic() - self._written >= SECONDS:
            self.save()

    def save(self) -> None:
        """Write the refined plan and the policy's estimates, if they changed.

        Write errors, such as a full disk, are ignored.
        """
        if not self._is_new:
            return
        with suppress(ArtifactError):
            self._plan.save(self._path)
            write_atomic(state_file(self._path), json.dumps(self._record()).encode())
        self._is_new, self._written = False, monotonic()

    def _record(self) -> dict[str, Any]:
        return {**_identity(self._plan), "state": self._state(), "was_busy": self._was_busy}


def was_busy(plan: Path) -> bool:
    """Return whether later requests have shown that the machine was busy when the steps of a plan were timed.

    ``plan`` is the file of a provisional plan. A request shows this if its timed passes, at least 16, took less than
    0.6 times the plan's step costs. The steps should then be timed again: requests do not correct the cost of a verify
    width that seems too slow, because the policy never chooses that width. The result is False if nothing was recorded.
    """
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        return bool(json.loads(state_file(plan).read_bytes()).get("was_busy"))
    return False


def state_file(plan: Path) -> Path:
    """Return the path of the JSON file with the acceptance estimates of ``plan``, NAME.yaml: NAME.learned.json."""
    return plan.with_suffix(".learned.json")


def _identity(plan: Plan) -> dict[str, Any]:
    drafter = None if plan.drafter is None else plan.drafter.fingerprint
    return {
        "version": VERSION, "model": plan.target.fingerprint, "drafter": drafter, "machine": plan.machine.fingerprint,
    }  # fmt: skip


def restore_estimates(path: Path, plan: Plan, use: Callable[[Mapping[str, Any]], None]) -> None:
    """Read the stored acceptance estimates of the plan in the file ``path``, and call ``use`` with them.

    Without a stored file nothing happens. A file that is damaged or of another model, drafter, machine or version is
    removed with a warning. ``use`` must raise KeyError, TypeError or ValueError if the estimates have another form.
    """
    file = state_file(path)
    try:
        kept = json.loads(file.read_bytes())
        if {name: kept.get(name) for name in _identity(plan)} != _identity(plan):
            raise ValueError("it is of another model, drafter, machine or version")
        use(kept["state"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        with suppress(OSError):
            file.unlink()
        print(  # noqa: T201
            f"yggdrasil: {shown(file)} is damaged or of another model; acceptance is learned anew", file=sys.stderr
        )
