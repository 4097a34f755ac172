"""Commands of the ``yggdrasil`` program."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from yggdrasil.artifacts import current_machine, list_plans, search_roots
from yggdrasil.cli import checks
from yggdrasil.cli.chat import chat
from yggdrasil.cli.checks import parse_widths
from yggdrasil.cli.figures import figures
from yggdrasil.cli.generate import generate
from yggdrasil.cli.opening import open_decoder
from yggdrasil.cli.options import ChatOption, Dtype, ForceOption
from yggdrasil.cli.parity import parity
from yggdrasil.cli.profile import profile
from yggdrasil.cli.report import report
from yggdrasil.cli.rules import exactness, rules
from yggdrasil.cli.search import search
from yggdrasil.errors import Interrupted, YggdrasilError
from yggdrasil.models.formats.names import Weights

if TYPE_CHECKING:
    pass

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Latency-optimal tree decoding."
)
app.command()(generate)
app.command()(chat)
app.command()(profile)
app.command()(search)
app.command()(report)
app.command()(parity)


@app.command()
def calibrate(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    drafter: Annotated[str, typer.Option(help="Folder or hub id of the draft model; ngram: n-gram lookup, no model.")],
    prompts: Annotated[
        Path,
        typer.Option(callback=checks.input_file, help="JSON lines with a prompt field; what you want to be fast on."),
    ],
    name: Annotated[str, typer.Option(callback=checks.name, help="Name of the profile, predictor and plan.")],
    root: Annotated[
        Path | None,
        typer.Option(callback=checks.output_folder, help="Where profiles/, predictors/ and plans/ are written."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Arithmetic of both models.")] = "bfloat16",
    weights: Annotated[
        Weights,
        typer.Option(help="file: the blocks of a GGUF file as they are; q8_0 to q4_0: rounded to that format."),
    ] = "full",
    quick: Annotated[bool, typer.Option("--quick", help="A first look: fewer prompts, widths and samples.")] = False,
    max_length: Annotated[int, typer.Option(min=1, help="Longest request in tokens, prompt included.")] = 2048,
    max_depth: Annotated[int, typer.Option(min=1, help="Deepest tree.")] = 8,
    draft_widths: Annotated[str, typer.Option(callback=checks.widths, help="Draft widths to consider.")] = "1,2,4,8",
    verify_widths: Annotated[
        str, typer.Option(callback=checks.widths, help="Verify widths to consider.")
    ] = "1,2,4,8,16,32,64",
    target_threads: Annotated[int, typer.Option(min=0, help="Threads of the target, 0 to measure.")] = 0,
    drafter_threads: Annotated[int, typer.Option(min=0, help="Threads of the drafter, 0 to measure.")] = 0,
    ngram: Annotated[
        str, typer.Option(help="Options of --drafter ngram, e.g. max_matching_ngram_size=4,is_public_pool=true.")
    ] = "",
    variants: Annotated[
        bool, typer.Option("--variants", help="Also time other ways to build the target's steps (minutes), on a CPU.")
    ] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where both models run.")] = "cpu",
    chat: ChatOption = False,
) -> None:
    """Measure this pair on this machine and write the plan to decode with. Interrupted, it resumes."""
    from yggdrasil.calibration.pipeline import calibrate as run
    from yggdrasil.calibration.settings import QUICK, CalibrationSettings, Effort, PairSource
    from yggdrasil.cli.drafters import ngram_options
    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.scheduling.plan import Shapes

    if quick:
        draft_widths, verify_widths = "1,2,4", "1,2,4,8,16,32"
    try:
        shapes = Shapes(
            max_length=max_length,
            max_depth=max_depth,
            draft_widths=parse_widths(draft_widths),
            verify_widths=parse_widths(verify_widths),
        )
    except ValueError as error:
        raise YggdrasilError(str(error)) from error
    if variants and device == "cuda":
        raise YggdrasilError("--variants times steps of a CPU; scripts/check_cuda.py compares a GPU's")
    if ngram and drafter != "ngram":
        raise YggdrasilError(f"--ngram is for --drafter ngram, the drafter is {drafter}")
    source = ngram_options(ngram) if drafter == "ngram" else drafter
    pair = PairSource(target, source, dtype, target_threads, drafter_threads, shapes, weights, device)
    if not prompts.exists():
        raise YggdrasilError(f"there is no prompt file {prompts}; give JSON lines with a prompt field")
    effort, place = QUICK if quick else Effort(), root or search_roots()[0]
    settings = CalibrationSettings(pair, prompts, name, place, effort, chat=chat, variants=variants)
    try:
        with PhaseProgress() as progress:
            plan = run(settings, progress)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was measured is kept, run the same command again to go on") from None
    _print_plan(plan)


bench_app = typer.Typer(invoke_without_command=True, no_args_is_help=True)
bench_app.command()(figures)
bench_app.command()(rules)
bench_app.command()(exactness)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def bench(
    context: typer.Context,
    plan: Annotated[str, typer.Option(help="A plan file, or a name that has a plan for this machine.")] = "",
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
    tree: Annotated[
        list[str] | None,
        typer.Option(help="Compare trees instead: a name, or all; can be repeated. With --json resumed."),
    ] = None,
    budget: Annotated[
        str, typer.Option(callback=checks.widths, help="Verify budgets of the trees: root and drafted nodes.")
    ] = "8,16,32,64",
    held_back: Annotated[int, typer.Option(min=1, help="Last prompts, which only calibrate static trees.")] = 4,
    eager: Annotated[
        bool, typer.Option("--eager", help="Trees without compiled steps: the same tokens and AAL, no valid times.")
    ] = False,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Compare with plain compiled decoding, prompt by prompt, alternating; or trees of other systems with ours."""
    if context.invoked_subcommand is not None:
        return
    if not plan or prompts is None:
        raise YggdrasilError("bench needs --plan and --prompts")
    if eager and not tree:
        raise YggdrasilError("--eager is for --tree: without compiled steps there is nothing to compare but AAL")
    from yggdrasil.bench.memory import resident_mb
    from yggdrasil.cli.comparing import compare_with_plain
    from yggdrasil.cli.trees import compare_trees
    from yggdrasil.prompts import read_prompts

    requests = read_prompts(prompts, limit, chat=chat)
    imports_mb = resident_mb()
    decoder = open_decoder(plan, dtype, force_machine=force_machine, backend="eager" if eager else None)
    settings = {
        "dtype": dtype or (decoder.plan.dtype if decoder.plan else None),
        "prompts_file": prompts.name,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "chat": chat,
    }
    if tree:
        budgets = parse_widths(budget)
        compare_trees(decoder, requests, settings, names=tree, budgets=budgets, held_back=held_back, out=out)
        return
    compare_with_plain(decoder, requests, settings, out, imports_mb=imports_mb)


@app.command()
def plans(
    name: Annotated[str | None, typer.Argument(help="Only plans of this name.")] = None,
    fits: Annotated[
        bool, typer.Option("--fits", help="Exit with 0 only if one fits this machine; print nothing else.")
    ] = False,
) -> None:
    """List the plans there are and whether they fit this machine."""
    machine = current_machine()
    entries = list_plans(name)
    if fits:
        raise typer.Exit(0 if any(entry.fits(machine) for entry in entries) else 1)
    for entry in entries:
        print(f"{entry.describe()}{'  (fits this machine)' if entry.fits(machine) else ''}")
    if not entries:
        print("no plans; make one with `yggdrasil calibrate`", file=sys.stderr)


def _print_plan(path: Path) -> None:
    from yggdrasil.scheduling.plan import Plan

    plan = Plan.load(path)
    best = plan.predicted
    print(path)
    print(f"predicted on held-out prompts: {best.speedup:.2f} x plain decoding, AAL {best.aal:.2f}, "
          f"{best.tpot_ms:.3g} ms a token ({best.policy})")  # fmt: skip
    for other in plan.rejected:
        print(
            f"  instead of {other.policy}: {other.speedup:.2f} x, AAL {other.aal:.2f}, {other.tpot_ms:.3g} ms a token"
        )
