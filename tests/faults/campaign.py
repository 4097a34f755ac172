"""Many cases on a few servers at once, their results kept as they come, and summed up."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from forked import Server
from kinds import DEAR, Kinds
from stage import Stage
from verdict import GOOD, REFUSED, RIGHT


@dataclass(frozen=True)
class Result:
    """One case and its verdict; the kind and the seed make it again."""

    kind: str
    seed: int
    done: str
    verdict: str
    seconds: float
    said: str
    commit: str  # of the code that ran

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD


class Log:
    """Results on disk, a line each, so that an interrupted campaign goes on where it stopped."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path, self.commit = path, commit
        lines = path.read_text().splitlines() if path.exists() else []
        self.results = [Result(**json.loads(line)) for line in lines]

    def add(self, result: Result) -> None:
        self.results.append(result)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def run_campaign(
    folder: Path, wanted: Mapping[str, int], seed: int, jobs: int, log: Log, report: Callable[[Result], None]
) -> None:
    """Run the first so many seeds of every kind that ``log`` does not hold yet."""
    stage = Stage(folder)
    done = {(result.kind, result.seed) for result in log.results}
    left: SimpleQueue[tuple[str, int]] = SimpleQueue()
    for case in _interleaved(wanted, seed):
        if case not in done:
            left.put(case)
    lock = Lock()
    faults: list[BaseException] = []

    def work() -> None:
        server = Server()
        kinds = Kinds(stage, server)
        try:
            while not faults:
                result = _run_one(kinds, server, *left.get_nowait(), log.commit)
                with lock:
                    log.add(result)
                    report(result)
        except Empty:
            pass
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            faults.append(error)
        finally:
            server.close()

    workers = [Thread(target=work, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]


def _run_one(kinds: Kinds, server: Server, kind: str, seed: int, commit: str) -> Result:
    start = time.monotonic()
    case = kinds.make(kind, seed)
    outcome = server.run(case.run)
    verdict = case.verdict(outcome)
    shutil.rmtree(case.folder, ignore_errors=True)
    lines = outcome.err.strip().splitlines()
    said = lines[-1][:300] if lines else ""
    return Result(kind, seed, case.done, verdict, round(time.monotonic() - start, 2), said, commit)


def _interleaved(wanted: Mapping[str, int], seed: int) -> Iterator[tuple[str, int]]:
    """Kinds in turns, those that take long behind the others."""
    for is_dear in (False, True):
        kinds = {kind: count for kind, count in wanted.items() if (kind in DEAR) == is_dear}
        for number in range(max(kinds.values(), default=0)):
            for kind, count in kinds.items():
                if number < count:
                    yield kind, seed + number


def section(results: Sequence[Result]) -> list[str]:
    """The results as lines of the documentation."""
    kinds = list(dict.fromkeys(result.kind for result in results))
    rows = [_row(kind, [result for result in results if result.kind == kind]) for kind in kinds]
    rows.append(_row("**all**", results))
    wrong = [result for result in results if not result.is_good]
    lines = [
        "Each case damages one thing in a sandbox of its own and runs a command in a process of its own. It may give",
        "the right output (the tokens of the undamaged pair, or of transformers on the same files), or end with exit",
        "code 2 and one sentence that names the file or the option.", "",
        "| what was damaged | cases | right output | refused in a sentence | anything else |", "|---|---|---|---|---|",
        *rows,
    ]  # fmt: skip
    commits = Counter(result.commit for result in results)
    if len(commits) > 1:
        run_on = ", ".join(f"{commit} ({count})" for commit, count in commits.most_common())
        lines += ["", f"Cases by the commit that they ran on: {run_on}."]
    if wrong:
        lines += ["", "What is left to mend:", ""]
        counted = Counter((result.kind, result.verdict) for result in wrong)
        lines += [f"- {kind}: {verdict} ({count})" for (kind, verdict), count in counted.most_common()]
    return lines


def _row(name: str, results: Sequence[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    other = len(results) - counts[RIGHT] - counts[REFUSED]
    return f"| {name} | {len(results)} | {counts[RIGHT]} | {counts[REFUSED]} | {other} |"
