"""What a forked process runs: the command line as it is, on eager steps, or a checkpoint without a plan."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer

NEW_TOKENS = 8


def run(program: str, arguments: list[str]) -> int:
    """The exit code of one of the programs below; a bug's exception passes."""
    sys.argv = ["yggdrasil", *arguments]
    try:
        PROGRAMS[program]()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def command_line() -> None:
    from yggdrasil.cli import main

    main()


def eager_command_line() -> None:
    """The command line over eager steps: the same tokens."""
    for module in ("yggdrasil.calibration.pair", "yggdrasil.engine.loading"):
        patch(f"{module}.default_backend", lambda *_, **__: "eager").start()  # raises where there is no such name
    command_line()


def unfinished_calibration() -> None:
    """The command line, a calibration, that ends well where all is measured and no plan is written yet."""

    def end(*arguments: object) -> None:
        raise SystemExit(0)

    patch("yggdrasil.calibration.pipeline.write_results", end).start()
    eager_command_line()


def calibrated_command_lines() -> None:
    """One command line, and where it ends well the one behind ``--``."""
    split = sys.argv.index("--")
    second = sys.argv[split + 1 :]
    del sys.argv[split:]
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            eager_command_line()
        except SystemExit as ended:
            if ended.code:
                raise
    sys.argv[1:] = second
    eager_command_line()


def threads() -> None:
    """A plan's texts from so many threads of this process on one decoder, which has them wait for each other."""
    from concurrent.futures import ThreadPoolExecutor

    from stage import NEW_TOKENS, TEXTS

    from yggdrasil import Decoder

    decoder = Decoder.from_plan(sys.argv[1], backend="eager")
    options = {"max_new_tokens": int(NEW_TOKENS), "ignore_eos": True, "wait": True}

    def decode(shift: int) -> list[list[int]]:
        order = [(i + shift) % len(TEXTS) for i in range(len(TEXTS))]
        made = {i: decoder.generate(TEXTS[i], **options).tokens for i in order}
        return [made[i] for i in range(len(TEXTS))]

    with ThreadPoolExecutor(int(sys.argv[2])) as pool:
        print(json.dumps(list(pool.map(decode, range(int(sys.argv[2]))))))


def watched_command_line() -> None:
    """The command line (behind ``--``), and what it occupies in memory after so many lines of its output."""
    from yggdrasil.bench.memory import resident_mb

    split = sys.argv.index("--")
    sizes, resident = [int(size) for size in sys.argv[1:split]], {}
    sys.argv[1:] = sys.argv[split + 1 :]
    out, written = sys.stdout, 0

    class Counting:
        def write(self, text: str) -> int:
            nonlocal written
            written += text.count("\n")
            if written in sizes and written not in resident:
                resident[written] = resident_mb()
            return out.write(text)

        def __getattr__(self, name: str) -> object:
            return getattr(out, name)

    sys.stdout = Counting()
    try:
        eager_command_line()
    finally:
        sys.stdout = out
        Path("resident.json").write_text(json.dumps(resident))


def import_ours() -> None:
    """Everything that a command of these programs imports."""
    import yggdrasil.calibration.pipeline
    import yggdrasil.calibration.search
    import yggdrasil.checkpoints.gguf.checkpoint
    import yggdrasil.checkpoints.gguf.facts
    import yggdrasil.engine.decoder
    import yggdrasil.pretrained
    import yggdrasil.reports.text  # noqa: F401
    from yggdrasil.cli.app import make_app

    make_app()


def checkpoint() -> None:
    """Load a checkpoint that no plan vouches for, decode, and hold it against transformers on the same files."""
    from yggdrasil.cli import run_script

    run_script(_decode_checkpoint, "yggdrasil")


def _decode_checkpoint(
    source: Annotated[str, typer.Argument()], dtype: Annotated[str, typer.Option()] = "float32"
) -> None:
    import torch

    from yggdrasil.checkpoints.facts import load_tokenizer
    from yggdrasil.checkpoints.source import Source
    from yggdrasil.drafters.ngram import NGramDrafter
    from yggdrasil.engine.assembly import assemble
    from yggdrasil.engine.decoder import Decoder
    from yggdrasil.engine.end_tokens import end_tokens
    from yggdrasil.policy.fixed import FixedPolicy
    from yggdrasil.runtime.loading import load_model
    from yggdrasil.runtime.selfcheck import check_tree_attention
    from yggdrasil.scheduling.plan import Shapes
    from yggdrasil.tree.shape import TreeShape

    tokenizer = load_tokenizer(source)
    model = load_model(source, getattr(torch, dtype), torch.device("cpu"), 1)
    check_tree_attention(model)  # as before every calibration
    shapes = Shapes(
        max_length=64, draft_widths=(1, 2), max_depth=2, candidates=4, verify_widths=(1, 4), prefill_widths=(8,)
    )
    assembly = assemble(model, NGramDrafter(), shapes=shapes, backend="eager")
    ends = end_tokens(str(Source.find(source).folder), model.sizes.eos, tokenizer)
    decoder = Decoder(assembly, tokenizer, FixedPolicy(TreeShape(2, 2, 4)), ends)
    made = decoder.generate("hello there, tin", max_new_tokens=NEW_TOKENS, ignore_eos=True)
    try:
        twin = _reference(source, dtype, tokenizer)
    except Exception:  # noqa: BLE001  (theirs: they read less, or refuse otherwise)
        twin = None
    print(json.dumps({"tokens": made.tokens, "reference": twin}))


def _reference(source: str, dtype: str, tokenizer: object) -> list[int]:
    """What transformers makes of the same files."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    options = {"dtype": getattr(torch, dtype), "local_files_only": True}
    if source.endswith(".gguf"):
        options |= {"gguf_file": Path(source).name, "quantization_config": GgufConfig(dequantize=True)}
        source = str(Path(source).parent)
    model = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    tokens = torch.tensor([tokenizer("hello there, tin")["input_ids"]])
    settings = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
        "use_cache": True,
    }
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, tokens.shape[1] :].tolist()


def python() -> None:
    """A line of Python: for the tests of the judge."""
    exec(sys.argv[1])


PROGRAMS = {
    "python": python,
    "yggdrasil": command_line,
    "eager": eager_command_line,
    "threads": threads,
    "watched": watched_command_line,
    "unfinished": unfinished_calibration,
    "calibrated": calibrated_command_lines,
    "checkpoint": checkpoint,
}
