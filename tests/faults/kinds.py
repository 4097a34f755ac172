"""Faults by kind: each makes one seeded case in a sandbox of its own."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from case import Case, Check
from contents import MODEL_FILES, TOKENIZER_FILES, change_table, change_tensor, damage_checkpoint
from forked import Outcome, Run, Server
from machine_made import damage_kept, damage_library, damage_text
from mutate import change_value, damage, replace_file
from stage import (
    CALIBRATE,
    COUNTED,
    NAME,
    TEXTS,
    UNFINISHED,
    Stage,
    generate,
    plan_file,
    predictor_folder,
    profile_folder,
)
from surroundings import surrounding
from verdict import wrong_tokens

KINDS = (
    "plan", "predictor", "counts", "profile", "library", "kept_tensors", "planned_checkpoint", "checkpoint",
    "tokenizer", "gguf", "prompts", "options", "unfinished", "kept_text", "surroundings",
)  # fmt: skip


class Kinds:
    """Each method named in ``KINDS`` makes a case from a sandbox and a seeded ``Random``."""

    def __init__(self, stage: Stage, server: Server) -> None:
        self.stage = stage
        self._server = server
        self._printed: dict[tuple[str, ...], str] = {}

    def make(self, kind: str, seed: int) -> Case:
        made: Case = getattr(self, kind)(self.stage.sandbox(f"{kind}-{seed}"), Random(f"{kind} {seed}"))
        return made

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
        path = predictor_folder(folder) / "predictor.safetensors"
        kind = random.choice(("bytes", "bytes", "file", "value"))
        if kind == "value":
            done = change_tensor(path, random)
        else:
            done = damage(path, random) if kind == "bytes" else replace_file(path, random)
        return Case(done, _run(generate(NAME, "--prompts", "prompts.jsonl"), folder), [path.name, NAME], self._tokens())

    def counts(self, folder: Path, random: Random) -> Case:
        """What a drafter that counts was taught."""
        path = predictor_folder(folder, COUNTED) / random.choice(("scorer.safetensors", "table.safetensors"))
        kind = random.choice(("bytes", "file", "value", "value"))
        if kind == "value":
            done = change_tensor(path, random)
        else:
            done = damage(path, random) if kind == "bytes" else replace_file(path, random)
        run = _run(generate(COUNTED, "--prompts", "prompts.jsonl"), folder)
        return Case(f"{path.name}: {done}", run, [path.name], self._tokens())

    def profile(self, folder: Path, random: Random) -> Case:
        path = profile_folder(folder) / random.choice(("stage_samples.csv", "schedule_samples.csv"))
        kind = random.choice(("bytes", "bytes", "file", "value"))
        search = random.random() < 0.5 and path.name == "schedule_samples.csv"
        arguments = ["search", NAME] if search else ["report", NAME, "--text"]
        if kind == "value":
            done = change_table(path, random)
            return Case(done, _run(arguments, folder), [path.name, NAME], lambda outcome: None)
        done = damage(path, random) if kind == "bytes" else replace_file(path, random)
        gone = done in ("gone", "a dangling link", "a link to itself")  # a report shows what there is
        check = (lambda outcome: None) if gone or search else self._same_text(arguments, folder)
        return Case(done, _run(arguments, folder), [path.name, NAME], check)

    def planned_checkpoint(self, folder: Path, random: Random) -> Case:
        """A checkpoint other than the plan was made for is refused, or makes no difference."""
        path, done = damage_checkpoint(folder / random.choice(("target", "drafter")), MODEL_FILES, random)
        arguments = generate(NAME, "--prompts", "prompts.jsonl")
        return Case(done, _run(arguments, folder), [path.name, path.parent.name], self._tokens())

    def tokenizer(self, folder: Path, random: Random) -> Case:
        """Files of a tokenizer, of a plan's models or of one that nothing vouches for."""
        if random.random() < 0.5:
            return self._unvouched(folder, TOKENIZER_FILES, random)
        path, done = damage_checkpoint(folder / random.choice(("target", "drafter")), TOKENIZER_FILES, random)
        run = _run(generate(NAME, "--prompts", "prompts.jsonl"), folder)
        return Case(done, run, [path.name, path.parent.name], self._tokens())

    def checkpoint(self, folder: Path, random: Random) -> Case:
        return self._unvouched(folder, MODEL_FILES, random)

    def _unvouched(self, folder: Path, files: Sequence[str], random: Random) -> Case:
        """A checkpoint that nothing vouches for is refused, or means to us what it means to transformers."""
        path, done = damage_checkpoint(folder / "target", files, random)
        dtype = random.choice(("float32", "float32", "bfloat16"))
        run = Run("checkpoint", ["target", "--dtype", dtype], str(folder))
        pristine = self.stage.of_whole("target", self._server)
        check = (lambda outcome: _as_reference(outcome, pristine)) if dtype == "float32" else _any
        return Case(done, run, [path.name, path.parent.name, "tokenizer"], check)

    def library(self, folder: Path, random: Random) -> Case:
        """A damaged library of kernels is never loaded."""
        environment = self.stage.machine_made(folder)
        path, done = damage_library(folder / "cache" / "kernels" / self.stage.library.name, random)
        run = Run("eager", generate(NAME, "--prompts", "prompts.jsonl"), str(folder), environment, fresh=True)
        return Case(done, run, [path.name, "kernels"], self._tokens())

    def kept_tensors(self, folder: Path, random: Random) -> Case:
        """What was kept of a model is as it was, or the model is loaded anew."""
        environment = self.stage.with_kept_models(folder, self._server)
        path, done = damage_kept(folder / "cache" / "models", random)
        run = replace(_run(generate(NAME, "--prompts", "prompts.jsonl"), folder), environment=environment)
        if any(part in ("facts", "float32") for part in path.parts):  # what was prepared of the GGUF file
            pristine = self.stage.of_whole("model.gguf", self._server)
            run = Run("checkpoint", ["model.gguf"], str(folder), environment)
            return Case(done, run, [path.name], lambda outcome: _as_reference(outcome, pristine))
        return Case(done, run, [path.name, path.parent.name], self._tokens())

    def unfinished(self, folder: Path, random: Random) -> Case:
        """A damaged part of an interrupted calibration is measured again."""
        environment = self.stage.with_unfinished(folder, self._server)
        work = next((folder / "profiles" / UNFINISHED).glob("*.partial"))
        path = random.choice([*sorted(work.iterdir()), work])
        done = replace_file(path, random) if path == work or random.random() < 0.3 else damage(path, random)
        return self._calibrated(folder, environment, path, done)

    def kept_text(self, folder: Path, random: Random) -> Case:
        """Of what a target wrote in earlier calibrations, what is whole is counted."""
        environment = self.stage.with_unfinished(folder, self._server)
        path = next((folder / "cache" / "texts").iterdir())
        return self._calibrated(folder, environment, path, damage_text(path, random))

    def _calibrated(self, folder: Path, environment: dict[str, str], path: Path, done: str) -> Case:
        run = Run("calibrated", [*CALIBRATE, "--", *generate(UNFINISHED, "--prompts", "prompts.jsonl")], str(folder))
        return Case(f"{path.name}: {done}", replace(run, environment=environment), [path.name], self._tokens())

    def gguf(self, folder: Path, random: Random) -> Case:
        """A GGUF file is refused, or means to us what it means to transformers (or as if it were whole)."""
        path = folder / "model.gguf"
        done = damage(path, random) if random.random() < 0.9 else replace_file(path, random)
        run = Run("checkpoint", [path.name], str(folder), {"YGGDRASIL_CACHE": str(folder / "cache")})
        pristine = self.stage.of_whole(path.name, self._server)
        return Case(done, run, [path.name], lambda outcome: _as_reference(outcome, pristine))

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

        from yggdrasil.cli.app import make_app

        chosen = random.choice(list(absurd_options(make_app(), NAME)))
        done = " ".join([*chosen.arguments[:2], f"{chosen.option}={chosen.value}"])
        return Case(f"{done:.60}", _run(chosen.arguments, folder), chosen.names, lambda outcome: "taken as it is")

    def surroundings(self, folder: Path, random: Random) -> Case:
        """A whole pair where the system fails: a closed stream, a folder that is none, a limit, no permission."""
        wrong = surrounding(folder, random)
        plan = str(plan_file(folder)) if wrong.is_away else NAME
        prompts = str(folder / "prompts.jsonl") if wrong.is_away else "prompts.jsonl"
        run = replace(_run(generate(plan, "--prompts", prompts), folder), fresh=True, **wrong.options)
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


def _as_reference(outcome: Outcome, pristine: list[int]) -> str | None:
    """``pristine`` tokens are right too, where the reference cannot read what we can."""
    record = json.loads(outcome.out.strip().splitlines()[-1])
    right = pristine if record["reference"] is None else record["reference"]
    return None if record["tokens"] == right else "different tokens"
