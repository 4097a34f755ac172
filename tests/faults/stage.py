"""What faults are injected into: a tiny random pair with all its artefacts, fresh for every case."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock

from forked import Run, Server

_COMPILER = """#!/bin/sh
# What would be compiled for the kernels was compiled before; what a step's sources became in an earlier run is kept.
for last; do :; done
case "$*" in
*ops.o*) exec cp "{library}" "$last";;
*native/*.cpp*) exec touch "$last";;
*.cpp\\ *-c\\ -o\\ *)
    made="$0-$({{ echo "$*"; cat "$1"; }} | sha256sum | cut -c1-32)"
    [ -e "$made" ] || {{ {gcc} "$@" && cp "$last" "$made.$$" && mv "$made.$$" "$made"; }} || exit 1
    exec cp "$made" "$last";;
*) exec {gcc} "$@";;
esac
"""

NAME = "faults"
COUNTED = "counted"  # a plan whose drafter counts
UNFINISHED = "unfinished"  # a calibration that ended before it wrote a plan
CALIBRATE = [
    "calibrate", "--quick", "target", "--prompts", "prompts.jsonl", "--name", UNFINISHED, "--root", ".",
    "--dtype", "float32", "--max-length", "200", "--max-depth", "4", "--verify-widths", "1,4",
    "--target-threads", "1", "--table-tokens", "2500",
]  # fmt: skip
NEW_TOKENS = "8"
TEXTS = ("hello there", "tin tons of it", "Red Hat 42!", "one more é", "aan bon cin")


def generate(source: str, *options: str) -> list[str]:
    """The command line that decodes with a plan or a model."""
    return ["generate", source, "--json", "--ignore-eos", "--max-new-tokens", NEW_TOKENS, *options]


class Stage:
    """A pristine copy in ``folder``; ``sandbox`` makes the one that is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base"
        self.cache = folder / "cache"  # what was compiled for the pair, and the kernels
        self._making = Lock()
        if not (self.base / "whole").exists():
            shutil.rmtree(self.base, ignore_errors=True)
            _build(self.base)
            (self.base / "whole").touch()

    def sandbox(self, number: int | str) -> Path:
        place = self.folder / f"case-{number}"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.base, place, symlinks=True)
        return place

    @cached_property
    def library(self) -> Path:
        """The kernels as they are compiled by ``compiler``."""
        from yggdrasil.library.compiling import library_name
        from yggdrasil.library.levels import chosen_levels

        return self.cache / "kernels" / library_name(chosen_levels()[0])

    @property
    def compiler(self) -> Path:
        """By its name torch knows what it is, and compiles its headers once."""
        return self.folder / "compiler" / "g++"

    def machine_made(self, sandbox: Path) -> dict[str, str]:
        """Put a copy of what is compiled beside a sandbox; returns the environment that has it used."""
        with self._making:
            if not (self.cache / "whole").exists():
                self._compile()
                (self.cache / "whole").touch()
        shutil.copytree(self.cache, sandbox / "cache")
        nothing = str(sandbox / "no-libraries")  # those of the cache are damaged
        return {"YGGDRASIL_CACHE": str(sandbox / "cache"), "YGGDRASIL_LIBRARIES": nothing, "CXX": str(self.compiler)}

    def with_kept_models(self, sandbox: Path, server: Server) -> dict[str, str]:
        """Put tensors and prepared GGUF files that earlier runs kept beside a sandbox; the environment to use them."""
        with self._making:
            kept = self._kept("models", server, [
                Run("eager", generate(NAME, "--prompt", TEXTS[0]), ""), Run("checkpoint", ["model.gguf"], ""),
            ])  # fmt: skip
        return _beside(kept, sandbox)

    def with_unfinished(self, sandbox: Path, server: Server) -> dict[str, str]:
        """Put a calibration that was interrupted, and the text that its target wrote, beside a sandbox."""
        with self._making:
            kept = self._kept("texts", server, [Run("unfinished", CALIBRATE, "", timeout=300.0)])
        shutil.copytree(kept.parent / "profiles" / UNFINISHED, sandbox / "profiles" / UNFINISHED)
        return _beside(kept, sandbox)

    def _kept(self, name: str, server: Server, runs: Sequence[Run]) -> Path:
        """The cache that ``runs`` fill, once."""
        folder = self.folder / f"kept-{name}"
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.base, folder)
            for run in runs:
                environment = {"YGGDRASIL_CACHE": str(folder / "cache")}
                outcome = server.run(replace(run, folder=str(folder), environment=environment))
                assert outcome.code == 0, outcome.err
            (folder / "whole").touch()
        return folder / "cache"

    def _compile(self) -> None:
        from yggdrasil import native
        from yggdrasil.artifacts.cache import cache_root
        from yggdrasil.library.build import INSTALLED

        assert native.is_native(), "faults are injected into native kernels: install g++"
        (self.cache / "kernels").mkdir(parents=True, exist_ok=True)
        gcc = os.environ.get("CXX") or shutil.which("g++")
        kernels = cache_root() / "kernels"
        own = next(each for each in (INSTALLED / self.library.name, kernels / self.library.name) if each.exists())
        for path in (own, own.with_suffix(".sha256")):
            shutil.copyfile(path, self.cache / "kernels" / path.name)
        self.compiler.parent.mkdir(exist_ok=True)
        self.compiler.write_text(_COMPILER.format(library=own, gcc=gcc))
        self.compiler.chmod(0o755)

    @cached_property
    def _whole(self) -> dict[str, list[int]]:
        return {}

    def of_whole(self, source: str, server: Server) -> list[int]:
        """Tokens of an undamaged checkpoint or GGUF file, which transformers chooses too."""
        with self._making:
            if source not in self._whole:
                folder = self.sandbox("whole")
                environment = {"YGGDRASIL_CACHE": str(folder / "cache")}
                outcome = server.run(Run("checkpoint", [source], str(folder), environment))
                assert outcome.code == 0, outcome.err
                record = json.loads(outcome.out.strip().splitlines()[-1])
                assert record["tokens"] == record["reference"], (
                    "None: transformers cannot read it here (GGUF files take accelerate)"
                )
                self._whole[source] = record["tokens"]
            return self._whole[source]

    @cached_property
    def reference(self) -> dict[str, list[int]]:
        """What every prompt's text is continued with where nothing is damaged: transformers' own choice."""
        import torch
        from tiny_pair import byte_tokenizer
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base / "target", dtype=torch.float32).eval()
        found = {}
        for text in TEXTS:
            tokens = torch.tensor([byte_tokenizer()(text)["input_ids"]])
            settings = {"do_sample": False, "max_new_tokens": int(NEW_TOKENS), "eos_token_id": None, "pad_token_id": 0}
            made = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
            found[text] = made[0, tokens.shape[1] :].tolist()
        return found

    def printed(self, server: Server, arguments: list[str]) -> str:
        """What a command prints where nothing is damaged."""
        outcome = server.run(Run("eager", arguments, str(self.sandbox("reference"))))
        assert outcome.code == 0, outcome.err
        return outcome.out


def _beside(cache: Path, sandbox: Path) -> dict[str, str]:
    shutil.copytree(cache, sandbox / "cache", ignore=shutil.ignore_patterns("kernels"))
    return {"YGGDRASIL_CACHE": str(sandbox / "cache")}


def plan_file(folder: Path, name: str = NAME) -> Path:
    return next((folder / "plans" / name).iterdir())


def predictor_folder(folder: Path, name: str = NAME) -> Path:
    return next((folder / "predictors" / name).iterdir())


def profile_folder(folder: Path) -> Path:
    return next((folder / "profiles" / NAME).iterdir())


def _build(base: Path) -> None:
    import torch
    from made_up import write_artifacts
    from tiny_pair import byte_tokenizer, noisy_copy, random_model

    from yggdrasil.artifacts import model_fingerprint, tokenizer_fingerprint
    from yggdrasil.drafters.model_free_options import StatisticsOptions
    from yggdrasil.scheduling.plan import ModelRef, Plan

    torch.set_num_threads(1)
    base.mkdir(parents=True)
    target = random_model()
    tokenizer = byte_tokenizer()
    for name, model in (("target", target), ("drafter", noisy_copy(target, 0.006))):
        model.save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    (base / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    refs = [ModelRef(name, model_fingerprint(base / name), 1) for name in ("target", "drafter")]
    path = write_artifacts(
        base,
        NAME,
        target=refs[0],
        drafters=[refs[1], StatisticsOptions(table=False)],
        tokenizer=tokenizer_fingerprint(base / "target"),
        depth_from="mean",
    )
    replace(Plan.load(path), name=NAME).save(path)
    made = write_artifacts(
        base, COUNTED, target=refs[0], drafters=[StatisticsOptions()], tokenizer=tokenizer_fingerprint(base / "target"),
        depth_from="mean",
    )  # fmt: skip
    replace(Plan.load(made), name=COUNTED).save(made)
    _write_counts(predictor_folder(base, COUNTED))
    from gguf_files import tiny_model, write_gguf

    write_gguf(base / "model.gguf", tiny_model("llama", vocab_size=96))


def _write_counts(folder: Path) -> None:
    """A table of any text at all, with the scorer that is usual."""
    from tiny_pair import TEXT

    from yggdrasil.drafters.statistics.scorer import NGramScorer
    from yggdrasil.drafters.statistics.table import Table
    from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE

    NGramScorer.default(with_table=True).save(folder / SCORER_FILE)
    Table.of([(TEXT[:4], TEXT[4:] * 3)]).save(folder / TABLE_FILE)
