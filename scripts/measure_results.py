"""Measure everything that docs/results.md shows, into profiles/NAME/MACHINE/, and put
the rows into docs/results/.

    scripts/measure_results --models smollm2=models/smollm2 smollm2-342M=models/342M smollm2-1B=models/1B \\
        --prompts prompts --llama-cpp work/llama.cpp --gguf smollm2=model.Q4_0.gguf \\
        --beside smollm2=text smollm2=ngram smollm2=yggdrasil:smollm2-135m-instruct,table

Every command is printed before it runs, the longest first. What was measured with the package's present sources is
skipped, so an interrupted run goes on where it stopped; a command that fails is named at the end and the others go on.
A model that has no plan for this machine is calibrated first, and quickly, into the user's cache, each plan of other
drafters that is to be decoded beside its own. The folder of prompts holds spec_bench.jsonl, c4.jsonl,
cnndm.jsonl, wikipedia.jsonl and humaneval.jsonl. On two idle cores everything takes about 45 minutes.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from yggdrasil.artifacts import current_machine, search_roots
from yggdrasil.drafters.registry import is_model_free_name
from yggdrasil.errors import YggdrasilError
from yggdrasil.pretrained import plan_name
from yggdrasil.prompts import read_prompts

ROOT = Path(__file__).resolve().parent.parent
YGGDRASIL = (sys.executable, "-c", "from yggdrasil.cli import main; main()")
CHAT, OTHERS = "spec_bench", ("c4", "cnndm", "wikipedia", "humaneval")
TOKENS, TAIL = 128, 256  # generated on each prompt; kept of a prompt that is no chat


class Effort(NamedTuple):
    """How much is measured on one model, and about how many minutes that takes."""

    chat: int  # prompts of Spec-Bench
    others: int  # prompts of each other set
    systems: tuple[int, int]  # the same for the comparison of systems
    equality: int  # chat prompts in float32
    without: tuple[str, ...]  # systems left out
    minutes: dict[str, float]
    steps: tuple[str, ...] | None = None  # single passes against llama.cpp's too, with these options


STATIC = "transformers, static"  # compiles for minutes, and was slower than the dynamic cache wherever it was tried
EFFORTS = {
    "smollm2": Effort(240, 12, (13, 3), 0, (STATIC,), {"chat": 6, "systems": 5}),
    "smollm2-bf16": Effort(240, 12, (0, 0), 100, (), {"chat": 8, "equality": 8, "steps": 4}, ("--limit", "12")),
    "smollm2-q4_0": Effort(26, 8, (8, 4), 0, ("transformers",), {"chat": 1, "systems": 3}),
    "smollm2-q4_k_m": Effort(26, 8, (8, 4), 0, ("transformers",), {"chat": 1, "systems": 3}),
    "smollm2-342M": Effort(26, 12, (6, 0), 0, (STATIC,), {"chat": 2, "systems": 3}),
    "smollm2-1B": Effort(
        13,
        6,
        (5, 0),
        0,
        ("transformers",),
        {"chat": 3, "systems": 4, "steps": 6},
        ("--contexts", "64", "--prefill-rounds", "5", "--limit", "2", "--max-new-tokens", "32"),
    ),
    "smollm2-1B-q8_0": Effort(13, 6, (0, 0), 0, (), {"chat": 2}),
    "smollm2-1B-q4_0": Effort(13, 6, (0, 0), 0, (), {"chat": 2}),
}
TINY = Effort(26, 12, (0, 0), 0, (), {})


class Task(NamedTuple):
    """One command and the file it writes."""

    minutes: float
    out: Path
    command: list[str]

    def state(self, is_current: "CurrentCommits") -> Literal["missing", "old", "begun", "done"]:
        """What the file is: not there, of other sources, of the present ones but not whole, or whole."""
        try:
            record = json.loads(self.out.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return "missing"
        if not is_current(str(record.get("commit"))):
            return "old"
        return "done" if record.get("complete", True) and record.get("summary") != [] else "begun"


class CurrentCommits:
    """Whether the package's sources at a commit are those of now."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def __call__(self, commit: str) -> bool:
        if commit not in self._known:
            command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", "yggdrasil"]
            known = not commit.endswith("+") and commit != "None"
            self._known[commit] = known and subprocess.run(command, capture_output=True, check=False).returncode == 0
        return self._known[commit]


def main() -> None:
    """Calibrate what has no plan, then run what is left to measure."""
    options = _options()
    models = dict(_named(text) for text in options.models)
    files, besides = [_named(text) for text in options.gguf], [_parted(text) for text in options.beside]
    is_current = CurrentCommits()
    with tempfile.TemporaryDirectory(prefix="yggdrasil-prompts-") as work:
        failed = [name for name, path in models.items() if not _calibrated(name, path, dry_run=options.dry_run)]
        tasks: list[Task] = []
        for name, path in models.items():
            others = {_plan_of(of, drafters): drafters for of, drafters in besides if of == name}
            failed += [
                plan
                for plan, drafters in others.items()
                if not _calibrated(plan, path, drafters.split(","), dry_run=options.dry_run)
            ]
            own_files = [Path(file) for of, file in files if of == name]
            if name not in failed:
                tasks += _tasks(
                    name, path, options, own_files, Path(work), [plan for plan in others if plan not in failed]
                )
        for task in sorted(tasks, key=lambda task: -task.minutes):
            state = "old" if options.again else task.state(is_current)
            if state == "done":
                print(f"measured already: {task.out.relative_to(ROOT)}", flush=True)
                continue
            if state == "old" and not options.dry_run:  # nothing of it may be taken up
                task.out.unlink(missing_ok=True)
            if not _run(task.command, dry_run=options.dry_run):
                failed.append(str(task.out.relative_to(ROOT)))
    if not options.dry_run:
        made = [str(task.out) for task in tasks if task.state(is_current) == "done"]
        collect = ["--collect", *made] if made else []
        subprocess.run([sys.executable, str(ROOT / "scripts" / "results_tables.py"), *collect], check=False)
    for name in failed:
        print(f"FAILED: {name}; its reason is above, run the same command again to go on", file=sys.stderr)
    raise SystemExit(1 if failed else 0)


def _tasks(
    name: str, path: str, options: argparse.Namespace, files: Sequence[Path], work: Path, beside: Sequence[str] = ()
) -> Iterator[Task]:
    effort, out = EFFORTS.get(name, TINY), ROOT / "profiles" / name / current_machine().slug
    chat = _picked(options.prompts / f"{CHAT}.jsonl", effort.chat, work / name)
    bench = [*YGGDRASIL, "bench", name, "--max-new-tokens", str(TOKENS)]
    bench += [part for plan in beside for part in ("--beside", plan)]
    minutes = effort.minutes.get("chat", 1.0)
    yield _task(minutes, out / "bench-specbench.json", [*bench, "--prompts", str(chat), "--chat"])
    for one in OTHERS:
        limits = ["--limit", str(effort.others), "--max-prompt-tokens", str(TAIL)]
        prompts = options.prompts / f"{one}.jsonl"
        yield _task(1.0, out / f"bench-{one}.json", [*bench, "--prompts", str(prompts), *limits])
    if effort.equality:
        command = [sys.executable, str(ROOT / "scripts" / "check_equality.py"), "--plan", name, "--chat"]
        command += ["--prompts", str(_picked(options.prompts / f"{CHAT}.jsonl", effort.equality, work / "equality"))]
        command += ["--limit", str(effort.equality), "--max-new-tokens", str(TOKENS), "--max-prompt-tokens", "2000"]
        command += ["--setting", "T=0", "--way", "plan"]
        yield _task(effort.minutes.get("equality", 5.0), out / "equality-specbench.json", command)
    yield from _systems(name, options, effort, files, out, work)
    if effort.steps is not None and options.llama_cpp:
        passes = [sys.executable, str(ROOT / "scripts" / "compare_steps.py"), path, *effort.steps]
        passes += ["--llama-cpp", str(options.llama_cpp), "--prompts", str(options.prompts / f"{CHAT}.jsonl")]
        yield _task(effort.minutes.get("steps", 4.0), out / "steps.json", passes)
    waiting = [sys.executable, str(ROOT / "scripts" / "measure_waiting.py")]
    yield _task(0.5, out / "turns.json", [*waiting, "turns", "--plan", name])
    yield _task(2.0, out / "first-contact.json", [*waiting, "first-contact", path])


def _systems(
    name: str, options: argparse.Namespace, effort: Effort, files: Sequence[Path], out: Path, work: Path
) -> Iterator[Task]:
    base = [sys.executable, str(ROOT / "scripts" / "compare_systems.py"), "--plan", name]
    base += [part for beginning in effort.without for part in ("--without", beginning)]
    base += [part for file in files for part in ("--gguf", str(file))]
    base += ["--llama-cpp", str(options.llama_cpp)] if options.llama_cpp else []
    base += ["--python-engines", str(options.python_engines)] if options.python_engines else []
    chat, others = effort.systems
    minutes = effort.minutes.get("systems", 3.0)
    if chat:
        prompts = _picked(options.prompts / f"{CHAT}.jsonl", chat, work / f"{name}-systems")
        besides = ["--prompts", str(prompts), "--chat", "--max-prompt-tokens", "1500"]
        yield _task(minutes, out / "systems-specbench.json", [*base, *besides])
    for one in OTHERS if others else ():
        besides = ["--prompts", str(options.prompts / f"{one}.jsonl"), "--limit", str(others)]
        yield _task(minutes / 3, out / f"systems-{one}.json", [*base, *besides])


def _task(minutes: float, out: Path, command: list[str]) -> Task:
    return Task(minutes, out, [*command, "--json", str(out)])


def _picked(source: Path, count: int, folder: Path) -> Path:
    """A file of the same name with ``count`` prompts, category by category in turns, so that few are of every kind."""
    by_category: dict[str | None, list[str]] = {}
    lines = [line for line in source.read_text(encoding="utf-8").split("\n") if line.strip()]
    for prompt, line in zip(read_prompts(source), lines, strict=True):
        by_category.setdefault(prompt.category, []).append(line)
    longest = max(map(len, by_category.values()))
    turns = [group[i] for i in range(longest) for group in by_category.values() if i < len(group)]
    folder.mkdir(parents=True, exist_ok=True)
    picked = folder / source.name
    picked.write_text("".join(f"{line}\n" for line in turns[:count]), encoding="utf-8")
    return picked


def _calibrated(name: str, path: str, drafters: Sequence[str] = (), *, dry_run: bool) -> bool:
    """Whether a plan of this name fits this machine, made now if need be: with other ``drafters`` quickly."""
    fits = subprocess.run([*YGGDRASIL, "plans", name, "--fits"], cwd=ROOT, check=False).returncode == 0
    command = [*YGGDRASIL, "calibrate", path, "--name", name]
    command += [part for drafter in drafters for part in ("--drafter", drafter)]
    command += ["--keep-drafter"] if not all(map(is_model_free_name, drafters)) else []
    command += ["--quick", "--root", str(search_roots()[-1])] if drafters else ["--root", str(ROOT)]
    return fits or _run(command, dry_run=dry_run)


def _plan_of(name: str, drafters: str) -> str:
    """What the plan of a model with other drafters is called: smollm2-text, smollm2-mine-table."""
    return "-".join([name, *(plan_name(drafter.rpartition(":")[2]) for drafter in drafters.split(","))])


def _run(command: Sequence[str], *, dry_run: bool) -> bool:
    """Print a command as a person would type it, and run it from the repository."""
    shown = ["yggdrasil", *command[len(YGGDRASIL) :]] if tuple(command[: len(YGGDRASIL)]) == YGGDRASIL else command[1:]
    print(f"\n==> {shlex.join(shown)}", flush=True)
    return dry_run or subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def _parted(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"measure_results: {text!r} is not NAME=VALUE")
    return name, value


def _named(text: str) -> tuple[str, str]:
    name, path = _parted(text)
    return name, str(Path(path).resolve()) if Path(path).exists() else path


def _resolved(text: str) -> Path:
    return Path(text).resolve()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=PATH", help="names of plans and models")
    parser.add_argument(
        "--prompts", type=_resolved, required=True, metavar="DIR", help="folder of the five prompt files"
    )
    parser.add_argument(
        "--llama-cpp", type=_resolved, metavar="DIR", help="where llama.cpp is built, or was; else left out"
    )
    parser.add_argument(
        "--python-engines", type=_resolved, metavar="DIR", help="where OpenVINO GenAI and ik_llama.cpp are installed"
    )
    parser.add_argument(
        "--gguf", nargs="*", default=[], metavar="NAME=FILE", help="other files of a model, for llama.cpp"
    )
    parser.add_argument(
        "--beside",
        nargs="*",
        default=[],
        metavar="NAME=DRAFTERS",
        help="other drafters, to decode side by side with them",
    )
    parser.add_argument("--again", action="store_true", help="measure everything, whatever is there")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except YggdrasilError as error:
        print(f"measure_results: {error}", file=sys.stderr)
        raise SystemExit(2) from None
