"""``yggdrasil bench``: what a plan gains beside plain decoding, or beside trees of other systems."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from yggdrasil.cli import checks
from yggdrasil.cli.checks import parse_widths
from yggdrasil.cli.model_argument import takes_model
from yggdrasil.cli.open_decoder import open_decoder
from yggdrasil.cli.shared_options import BackendOption, ChatOption, Dtype, ForceOption
from yggdrasil.errors import YggdrasilError


class DefaultCommand(TyperGroup):
    """A group whose command ``NAME`` is meant where no other is named: ``bench MODEL`` is ``bench plain MODEL``."""

    NAME = "plain"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [self.NAME, *args]
        return super().parse_args(ctx, args)


@takes_model("plan")
def bench(
    plan: str,
    prompts: Annotated[
        Path | None,
        typer.Option(callback=checks.input_file, help="JSON lines with a prompt field, unseen by the calibration."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate on each.")] = 64,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Keep only the last so many tokens of a prompt.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Arithmetic of both models; the plan's if not given.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=checks.output_file, help="Write every sample and the summary here."),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(help="Another plan of the same target, decoded side by side with it; can be repeated."),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(help="Compare trees instead: a name, or all; can be repeated. With --json resumed."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            callback=checks.widths, help="Verify budgets of the trees, root and drafted nodes; else 8,16,32,64."
        ),
    ] = None,
    held_back: Annotated[
        int | None, typer.Option(min=1, help="Last prompts, which only calibrate static trees; else 4.")
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Trees without compiled steps: the same tokens and AAL, no valid times.")
    ] = False,
    chat: ChatOption = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after a chat's end, as is always done with plain prompts.")
    ] = False,
    force_machine: ForceOption = False,
    backend: BackendOption = None,
) -> None:
    """Compare with plain compiled decoding, greedily, prompt by prompt, in turns; or trees of other systems with ours.

    Plain prompts go on for --max-new-tokens. With --chat an answer ends where the model ends it: what is written behind
    an end repeats itself, which is fast and of no use. Both ways of decoding write the same tokens.
    """
    if prompts is None:
        raise YggdrasilError("bench needs --prompts FILE: what is to be decoded")
    if eager and not tree:
        raise YggdrasilError("--eager is for --tree: without compiled steps there is nothing to compare but AAL")
    if not tree and (budget is not None or held_back is not None):
        raise YggdrasilError("--budget and --held-back are for --tree, which is not given")
    if eager and backend is not None:
        raise YggdrasilError("--eager builds no steps for --backend to choose; give one of them")
    if tree and beside:
        raise YggdrasilError("--beside compares plans and --tree trees; give one of them")
    from yggdrasil.bench.memory import resident_mb
    from yggdrasil.cli.benchmarks.compare import compare_with_plain, opened_beside
    from yggdrasil.cli.benchmarks.trees import chosen_trees, compare_trees
    from yggdrasil.prompts import read_prompts

    requests = read_prompts(prompts, limit, chat=chat)
    chosen_trees(tree or ())  # before a model is loaded
    imports_mb = resident_mb()
    decoder = open_decoder(plan, dtype, force_machine=force_machine, backend="eager" if eager else backend)
    settings = {
        "dtype": dtype or (decoder.plan.dtype if decoder.plan else None),
        "prompts_file": prompts.name,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "chat": chat,
        "ignore_eos": ignore_eos or not chat or bool(tree),
    }
    if tree:
        budgets = parse_widths(budget or "8,16,32,64")
        compare_trees(decoder, requests, settings, names=tree, budgets=budgets, held_back=held_back or 4, out=out)
        return
    others = opened_beside(beside or (), dtype, force_machine=force_machine, backend=backend)
    compare_with_plain(decoder, requests, settings, out, imports_mb=imports_mb, beside=others)
