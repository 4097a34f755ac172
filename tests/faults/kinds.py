"""Faults by kind: each makes one seeded case in a sandbox of its own."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from forked import Outcome, Run, Server
from mutate import change_json, change_value, damage, replace_file
from stage import NAME, NEW_TOKENS, TEXTS, Stage, plan_file, predictor_folder, profile_folder
from surroundings import surrounding
from verdict import judge, wrong_tokens

Check = Callable[[Outcome], str | None]
# How many cases of each kind there are among all.
SHARES = {
    "plan": 5, "predictor": 4, "profile": 3, "checkpoint of a plan": 4, "checkpoint": 6, "prompts": 4,
    "options": 6, "surroundings": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One fault: what was done, what is run on it, and what may come of it."""

    done: str
    run: Run
    names: Sequence[str]  # one of them stands in a refusal
    check: Check  # what is wrong with the output of a run that ends well
    codes: Sequence[int] = field(default=(2,))

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    def verdict(self, outcome: Outcome) -> str:
        return judge(outcome, self.names, self.check(outcome) if outcome.code == 0 else None, self.codes)


@cache
def _takes_source() -> bool:
    import typer

    from yggdrasil.cli.app import app

    parameters = typer.main.get_command(app).commands["generate"].params  # type: ignore[attr-defined]
    return any(parameter.param_type_name == "argument" for parameter in parameters)


def generate(plan: str, *options: str) -> list[str]:
    source = [plan] if _takes_source() else ["--plan", plan]
    return ["generate", *source, "--json", "--ignore-eos", "--max-new-tokens", NEW_TOKENS, *options]


class Kinds:
    """The kinds by name; a kind is a function of a sandbox and a seeded ``Random``."""

    def __init__(self, stage: Stage, server: Server) -> None:
        self.stage = stage
        self._server = server
        self._printed: dict[tuple[str, ...], str] = {}
        self.kinds: dict[str, Callable[[Path, Random], Case]] = {
            "plan": self.plan, "predictor": self.predictor, "profile": self.profile,
            "checkpoint of a plan": self.planned_checkpoint, "checkpoint": self.checkpoint, "prompts": self.prompts,
            "options": self.options, "surroundings": self.surroundings,
        }  # fmt: skip

    def make(self, kind: str, seed: int) -> Case:
        return self.kinds[kind](self.stage.sandbox(f"{kind.replace(' ', '-')}-{seed}"), Random(f"{kind} {seed}"))

    def plan(self, folder: Path, random: Random) -> Case:
        from yggdrasil.artifacts import read_yaml, write_yaml
        from yggdrasil.scheduling.plan import SCHEMA_VERSION

        path = plan_file(folder)
        kind = random.choice(("bytes", "bytes", "file", "value", "value"))
        if kind == "value":  # with a checksum that fits: what a hand that knows its way would write
            content, done = change_value(read_yaml(path, "plan", SCHEMA_VERSION), random)
            try:
                write_yaml(path, "plan", SCHEMA_VERSION, content)
            except (ValueError, TypeError, UnicodeError):
                return self.plan(self.stage.sandbox(folder.name.removeprefix("case-")), random)
        else:
            done = damage(path, random) if kind == "bytes" else replace_file(path, random)
        name = random.choice((NAME, str(path.relative_to(folder))))
        check = self._tokens(generates_anything=done.split(".")[0].split(" ")[0] in ("dtype", "weights"))
        return Case(done, _run(generate(name, "--prompts", "prompts.jsonl"), folder), [path.name, NAME], check)

    def predictor(self, folder: Path, random: Random) -> Case:
        path = predictor_folder(folder) / random.choice(
            ("predictor.safetensors",) * 3 + ("report.csv", "calibration.csv")
        )
        kind = random.choice(("bytes", "bytes", "file", "value"))
        if kind == "value" and path.suffix == ".safetensors":
            done = _change_tensor(path, random)
        else:
            done = damage(path, random) if kind != "file" else replace_file(path, random)
        if path.suffix == ".safetensors":
            return Case(
                done, _run(generate(NAME, "--prompts", "prompts.jsonl"), folder), [path.name, NAME], self._tokens()
            )
        report = ["report", "--name", NAME, "--text"]
        return Case(done, _run(report, folder), [path.name], self._same_text(report, folder))

    def profile(self, folder: Path, random: Random) -> Case:
        path = profile_folder(folder) / random.choice(("stage_samples.csv", "schedule_samples.csv"))
        kind = random.choice(("bytes", "bytes", "file", "value"))
        search = random.random() < 0.5 and path.name == "schedule_samples.csv"
        arguments = ["search", "--profile", NAME] if search else ["report", "--name", NAME, "--text"]
        if kind == "value":
            done = _change_table(path, random)
            return Case(done, _run(arguments, folder), [path.name, NAME], lambda outcome: None)
        done = damage(path, random) if kind == "bytes" else replace_file(path, random)
        gone = done in ("gone", "a dangling link", "a link to itself")  # a report shows what there is
        check = (lambda outcome: None) if gone or search else self._same_text(arguments, folder)
        return Case(done, _run(arguments, folder), [path.name, NAME], check)

    def planned_checkpoint(self, folder: Path, random: Random) -> Case:
        """A checkpoint other than the plan was made for is refused, or makes no difference."""
        path, done = _damage_checkpoint(folder / random.choice(("target", "drafter")), random)
        arguments = generate(NAME, "--prompts", "prompts.jsonl")
        return Case(done, _run(arguments, folder), [path.name, path.parent.name], self._tokens())

    def checkpoint(self, folder: Path, random: Random) -> Case:
        """A checkpoint that nothing vouches for is refused, or means to us what it means to transformers."""
        path, done = _damage_checkpoint(folder / "target", random)
        dtype = random.choice(("float32", "float32", "bfloat16"))
        run = Run("checkpoint", ["target", "--dtype", dtype], str(folder))
        return Case(
            done, run, [path.name, path.parent.name, "tokenizer"], _as_reference if dtype == "float32" else _any
        )

    def prompts(self, folder: Path, random: Random) -> Case:
        path = folder / "prompts.jsonl"
        kind = random.choice(("bytes", "file", "value", "value", "line"))
        lines = path.read_text().splitlines()
        if kind == "value":
            number = random.randrange(len(lines))
            content, done = change_value(json.loads(lines[number]), random)
            lines[number] = json.dumps(content)
            path.write_text("\n".join(lines) + "\n")
        elif kind == "line":
            done = random.choice(BAD_LINES)
            lines.insert(random.randrange(len(lines) + 1), done)
            path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
        else:
            done = damage(path, random) if kind == "bytes" else replace_file(path, random)
        run = _run(generate(NAME, "--prompts", "prompts.jsonl"), folder)
        # One bad prompt does not end the others: they are answered, and the exit code still tells.
        return Case(f"{done:.60}", run, [path.name], self._tokens(_texts(path)), codes=(2,))

    def options(self, folder: Path, random: Random) -> Case:
        """An absurd value of any option is refused by name, on a whole plan as on one whose models are gone."""
        from options import absurd_options

        from yggdrasil.cli.app import app

        chosen = random.choice(list(absurd_options(app, NAME)))
        done = " ".join([*chosen.arguments[:2], f"{chosen.option}={chosen.value}"])
        return Case(f"{done:.60}", _run(chosen.arguments, folder), chosen.names, lambda outcome: "taken as it is")

    def surroundings(self, folder: Path, random: Random) -> Case:
        """A whole pair where the system fails: a closed stream, a folder that is none, a limit, no permission."""
        wrong = surrounding(folder, random)
        run = replace(_run(generate(NAME, "--prompts", "prompts.jsonl"), folder), **wrong.options)
        check = self._tokens() if run.stdout is None else lambda outcome: "nothing was said"
        return Case(wrong.done, run, wrong.names, check, wrong.codes)

    def _tokens(self, texts: dict[str, str] | None = None, *, generates_anything: bool = False) -> Check:
        wanted = {str(i): text for i, text in enumerate(TEXTS)} if texts is None else texts
        reference = {} if generates_anything else self.stage.reference
        return lambda outcome: wrong_tokens(outcome.out, reference, wanted)

    def _same_text(self, arguments: list[str], folder: Path) -> Check:
        key = tuple(arguments)
        if key not in self._printed:
            self._printed[key] = self.stage.printed(self._server, arguments)
        expected = self._printed[key]
        return lambda outcome: None if outcome.out == expected else "another output"


BAD_LINES = (
    "{}", "null", "[]", "7", '"text"', "{", '{"prompt": 7}', '{"prompt": null}', '{"prompt": ""}',
    '{"prompt": "\\ud800"}',
    '{"prompt": "a", "messages": []}', '{"messages": "hello"}', '{"messages": [{"role": "king", "content": "a"}]}',
    '{"messages": [{"role": "user", "content": "hello"}]}', '{"messages": [{"role": "user"}]}', "[" * 100_000,
    '{"prompt": ' + "[" * 100_000, '{"id": ' + "9" * 5000 + ', "prompt": "hello"}',
    '{"prompt": "' + "a" * 100_000 + '"}',
    '{"id": "0", "prompt": "hello there"}', '{"prompt": "a", "prompt": "b"}', "NaN", '{"prompt": "\\u0000"}', "\x00",
    "\ufeff{}", '{"prompt": "hello there", "id": {"a": 1}}', '{"prompt": "a", "category": [1]}', "\ud800",
)  # fmt: skip


def _texts(path: Path) -> dict[str, str]:
    """Prompts by id, of the lines that hold one each."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError):
        return {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            found[str(record.get("id", number))] = record["prompt"] if "messages" not in record else ""
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _run(arguments: list[str], folder: Path) -> Run:
    return Run("eager", arguments, str(folder))


def _any(outcome: Outcome) -> None:
    return None


def _as_reference(outcome: Outcome) -> str | None:
    record = json.loads(outcome.out.strip().splitlines()[-1])
    return None if record["tokens"] == record["reference"] else "different tokens"


def _damage_checkpoint(folder: Path, random: Random) -> tuple[Path, str]:
    """Damage a file of a checkpoint; returns the file and what was done."""
    weights, config, tokenizer = "model.safetensors", "config.json", "tokenizer.json"
    names = (
        weights,
        weights,
        config,
        config,
        config,
        tokenizer,
        tokenizer,
        "tokenizer_config.json",
        "generation_config.json",
    )
    path = folder / random.choice(names)
    if path.suffix == ".json" and random.random() < 0.6:
        done = change_json(path, random)
    elif path.name == weights and random.random() < 0.4:
        done = _change_weights(path, random)
    else:
        done = damage(path, random) if random.random() < 0.8 else replace_file(path, random)
    return path, f"{path.name}: {done}"


def _change_weights(path: Path, random: Random) -> str:
    """A whole file that lacks a tensor, has one more, or one of another shape, type or content."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    kind = random.choice(("removed", "renamed", "misshapen", "flat", "another type", "not finite", "added"))
    if kind == "removed":
        del tensors[name]
    elif kind == "renamed":
        tensors[name + ".old"] = tensors.pop(name)
    elif kind == "misshapen":
        tensors[name] = tensors[name][:-1].contiguous()
    elif kind == "flat":
        tensors[name] = tensors[name].flatten()[None].contiguous()
    elif kind == "another type":
        tensors[name] = tensors[name].to(random.choice((torch.int8, torch.float16, torch.float64, torch.bool)))
    elif kind == "not finite":
        tensors[name].view(-1)[0] = random.choice((float("nan"), float("inf")))
    else:
        tensors["model.layers.7.extra.weight"] = torch.zeros(3)
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{name} {kind}"


def _change_tensor(path: Path, random: Random) -> str:
    import numpy as np

    from yggdrasil.artifacts import read_tensors, write_tensors
    from yggdrasil.predictor.bundle import KIND, SCHEMA_VERSION

    arrays = read_tensors(path, KIND, SCHEMA_VERSION)
    name = random.choice(sorted(arrays))
    kind = random.choice(("removed", "nan", "inf", "negative", "huge", "shape", "type", "empty", "number"))
    array = arrays.pop(name)
    changes: dict[str, Any] = {
        "nan": lambda: np.full_like(array, np.nan, np.float32), "inf": lambda: np.full_like(array, np.inf, np.float32),
        "negative": lambda: -array, "huge": lambda: array * 10**9, "shape": lambda: array[..., None],
        "type": lambda: array.astype(np.int8), "empty": lambda: array[:0] if array.ndim else array,
        "number": lambda: np.float32(1.0),
    }  # fmt: skip
    if kind != "removed":
        arrays[name] = changes[kind]()
    write_tensors(path, KIND, SCHEMA_VERSION, arrays)
    return f"{name}: {kind}"


def _change_table(path: Path, random: Random) -> str:
    """A table with the checksum that fits and content that does not."""
    from yggdrasil.artifacts import read_csv, write_csv

    kind, version = ("stage-samples", 1) if path.name == "stage_samples.csv" else ("schedule-samples", 2)
    frame = read_csv(path, kind, version)
    column = random.choice(list(frame.columns))
    change = random.choice(("removed", "text", "negative", "missing", "huge", "no rows", "few rows"))
    if change == "removed":
        frame = frame.drop(columns=column)
    elif change in ("no rows", "few rows"):
        frame = frame.iloc[: 0 if change == "no rows" else random.randrange(1, 4)]
    else:
        frame = frame.astype({column: object})
        frame.loc[random.randrange(len(frame)), column] = {
            "text": "x",
            "negative": -1,
            "missing": None,
            "huge": 10**30,
        }[change]
    write_csv(path, kind, version, frame)
    return f"{column} {change}"
