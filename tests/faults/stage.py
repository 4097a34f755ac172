"""What faults are injected into: a tiny random pair with all its artefacts, fresh for every case."""

import json
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from forked import Run, Server

NAME = "faults"
NEW_TOKENS = "8"
TEXTS = ("hello there", "tin tons of it", "Red Hat 42!", "one more é", "aan bon cin")
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


class Stage:
    """A pristine copy in ``folder``; ``sandbox`` makes the one that is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base"
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


def plan_file(folder: Path) -> Path:
    return next((folder / "plans" / NAME).iterdir())


def predictor_folder(folder: Path) -> Path:
    return next((folder / "predictors" / NAME).iterdir())


def profile_folder(folder: Path) -> Path:
    return next((folder / "profiles" / NAME).iterdir())


def _build(base: Path) -> None:
    import torch
    from made_up import write_artifacts
    from tiny_pair import byte_tokenizer, noisy_copy, random_model

    from yggdrasil.artifacts import model_fingerprint, tokenizer_fingerprint
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
        base, NAME, target=refs[0], drafter=refs[1], tokenizer=tokenizer_fingerprint(base / "target"), depth_from="mean"
    )
    replace(Plan.load(path), name=NAME).save(path)
