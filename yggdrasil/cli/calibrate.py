"""``yggdrasil calibrate``: measures a model on this machine and writes a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from yggdrasil.artifacts import MOST_THREADS, search_roots
from yggdrasil.checkpoints.formats.names import AUTO, Weights
from yggdrasil.cli import checks
from yggdrasil.cli.shared_options import BackendOption, ChatOption, Dtype, TargetArgument
from yggdrasil.errors import Interrupted, YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.drafters.registry import NamedDrafters
    from yggdrasil.scheduling.plan import Shapes

ARITHMETIC, SHAPES, EFFORT = "Arithmetic and threads", "Sizes", "Calibration"
WIDTHS = "1,2,4,8", "1,2,3,4,6,8,16,32,64"  # draft and verify
WEIGHTS = f"[{'|'.join((AUTO, *get_args(Weights)))}]"


def calibrate(
    target: TargetArgument,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="A draft model (folder, .gguf file or hub id); a draft head (folder, or yggdrasil:NAME for a shipped "
            "one); text, n-gram statistics of the request's text; table, of the target's own text (default: both); "
            "ngram, n-gram lookup; module:Class, your own class; none, plain decoding. Repeat it to combine several in "
            "one tree."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            callback=checks.input_file,
            help="JSON lines with a prompt field, like the prompts you will use. Default: shipped prompts.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(callback=checks.name, help="Name of the profile, predictor and plan. Default: the target's name."),
    ] = None,
    root: Annotated[
        Path | None, typer.Option(callback=checks.output_folder, help="Folder for profiles/, predictors/ and plans/.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of target and drafter.", rich_help_panel=ARITHMETIC)] = "bfloat16",
    weights: Annotated[
        str,
        typer.Option(
            callback=checks.weights,
            metavar=WEIGHTS,
            help="Format of the target's weights in memory. full: --dtype; file: the file's quantised blocks (GGUF, "
            "MXFP4 experts); others: quantised at loading. auto: file if the native CPU kernels read the file's blocks "
            "and --dtype is bfloat16, else full.",
            rich_help_panel=ARITHMETIC,
        ),
    ] = AUTO,
    drafter_weights: Annotated[
        str,
        typer.Option(
            callback=checks.weights,
            metavar=WEIGHTS,
            help="Format of a draft model's weights, as --weights.",
            rich_help_panel=ARITHMETIC,
        ),
    ] = AUTO,
    quick: Annotated[bool, typer.Option("--quick", help="Use fewer prompts, widths and samples.")] = False,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest request in tokens, prompt included. Default: the models' context, limited by memory.",
            rich_help_panel=SHAPES,
        ),
    ] = None,
    max_depth: Annotated[int, typer.Option(min=1, help="Maximum depth of a tree.", rich_help_panel=SHAPES)] = 8,
    draft_widths: Annotated[
        str | None,
        typer.Option(
            callback=checks.widths, help=f"Draft widths to consider. Default: {WIDTHS[0]}.", rich_help_panel=SHAPES
        ),
    ] = None,
    verify_widths: Annotated[
        str | None,
        typer.Option(
            callback=checks.widths, help=f"Verify widths to consider. Default: {WIDTHS[1]}.", rich_help_panel=SHAPES
        ),
    ] = None,
    target_threads: Annotated[
        int,
        typer.Option(min=0, max=MOST_THREADS, help="Threads of the target; 0: measure.", rich_help_panel=ARITHMETIC),
    ] = 0,
    drafter_threads: Annotated[
        int,
        typer.Option(min=0, max=MOST_THREADS, help="Threads of the drafter; 0: measure.", rich_help_panel=ARITHMETIC),
    ] = 0,
    ngram: Annotated[
        str,
        typer.Option(
            help="Options of --drafter ngram, e.g. max_matching_ngram_size=4,is_public_pool=true.",
            rich_help_panel=EFFORT,
        ),
    ] = "",
    table_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of text that the target generates for the table. Default: 10 minutes', 1 with --quick.",
            rich_help_panel=EFFORT,
        ),
    ] = None,
    own_table: Annotated[
        bool, typer.Option("--own-table", help="Count only text of the target in its table, no shipped text.")
    ] = False,
    keep_drafter: Annotated[
        bool,
        typer.Option(
            "--keep-drafter",
            help="Keep the drafter even if model-free drafts alone are as fast.",
            rich_help_panel=EFFORT,
        ),
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Device of target and drafter.", rich_help_panel=ARITHMETIC)
    ] = "cpu",
    backend: BackendOption = None,
    chat: ChatOption = False,
) -> None:
    """Measure a model and its drafters on this machine, and write the fastest plan.

    If interrupted, the same command resumes.
    """
    from yggdrasil.calibration.calibration_settings import QUICK, CalibrationSettings, Effort, PairSource
    from yggdrasil.calibration.pair import default_drafter_weights, default_max_length
    from yggdrasil.calibration.pipeline import calibrate as run
    from yggdrasil.checkpoints.facts import load_tokenizer
    from yggdrasil.checkpoints.usual_weights import usual_weights
    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.drafters.heads.kinds import is_head
    from yggdrasil.drafters.registry import USUAL, named_drafters
    from yggdrasil.engine.plan_lookup import plan_name
    from yggdrasil.prompts import default_prompts

    if chat and prompts is None:
        raise YggdrasilError("--chat is for --prompts FILE, which is not given")
    named = named_drafters(drafter or USUAL, ngram)
    if table_tokens is not None and not named.has_table:
        raise YggdrasilError("--table-tokens is for --drafter table, which is not asked for")
    if own_table and not named.has_table:
        raise YggdrasilError("--own-table is for --drafter table, which is not asked for; leave it out")
    if keep_drafter and named.drafter is None:
        raise YggdrasilError("--keep-drafter is for a draft model or a head, and none is asked for; leave it out")
    length = max_length or default_max_length(target, named.drafter, device)
    shapes = _shapes(length, max_depth, draft_widths, verify_widths, named, quick=quick)
    chosen = usual_weights(target, dtype, device) if weights == AUTO else cast(Weights, weights)
    usual = default_drafter_weights(named.drafter, dtype, device)
    if drafter_weights != AUTO and (named.drafter is None or is_head(named.drafter)):
        raise YggdrasilError("--drafter-weights is for a draft model, which is not asked for")
    pair = PairSource(
        target, named.drafter, dtype, target_threads, drafter_threads, shapes, chosen,
        usual if drafter_weights == AUTO else cast(Weights, drafter_weights), device, named.model_free, backend=backend,
    )  # fmt: skip
    texts, is_chat = (prompts, chat) if prompts is not None else default_prompts(load_tokenizer(target))
    settings = CalibrationSettings(
        pair, texts, name or plan_name(target), root or search_roots()[0], QUICK if quick else Effort(), chat=is_chat,
        keeps_drafter=keep_drafter, table_tokens=table_tokens, own_table=own_table,
    )  # fmt: skip
    try:
        with PhaseProgress() as progress:
            plan = run(settings, progress)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; what was compiled and measured is kept, run the same command again to go on"
        ) from None
    _print_plan(plan)


def _shapes(
    max_length: int, max_depth: int, draft: str | None, verify: str | None, named: "NamedDrafters", *, quick: bool
) -> "Shapes":
    """Return the shapes to consider; ``quick`` and the drafters determine widths that are not given."""
    from yggdrasil.calibration.calibration_settings import QUICK_WIDTHS
    from yggdrasil.scheduling.plan import Shapes

    if (draft and named.drafter is None) or (verify and named.is_plain):
        option, what = ("--draft-widths", "a draft model") if draft else ("--verify-widths", "drafters")
        raise YggdrasilError(f"{option} is for {what}, and none is asked for; leave it out")
    usual = QUICK_WIDTHS if quick else tuple(map(checks.parse_widths, WIDTHS))
    usual = () if named.drafter is None else usual[0], (1,) if named.is_plain else usual[1]
    widths = [
        checks.parse_widths(given) if given else least for given, least in zip((draft, verify), usual, strict=True)
    ]
    if named.drafter is not None and widths[1] == (1,):
        raise YggdrasilError("--verify-widths 1 leaves no tree to verify; give others too, such as 1,2,4,8")
    try:
        return Shapes(max_length=max_length, max_depth=max_depth, draft_widths=widths[0], verify_widths=widths[1])
    except ValueError as error:
        raise YggdrasilError(str(error)) from error


def _print_plan(path: Path) -> None:
    from yggdrasil.drafters.statistics.drafter import table_origin
    from yggdrasil.scheduling.plan import Plan

    plan = Plan.load(path)
    best = plan.predicted
    print(path)
    print(plan.describe())
    print(f"predicted with {best.policy}: {best.describe()}")
    for other in plan.rejected:
        gain = f"{other.speedup:.2f} x plain decoding"
        print(f"  with {other.policy}: {gain}, AAL {other.aal:.2f}, {other.tpot_ms:.3g} ms per token; not chosen")
    if (origin := table_origin(path.parent / plan.predictor)) is not None:
        print(origin)
    if plan.left_out is not None:
        print(f"left out {plan.left_out.describe()}; --keep-drafter keeps it")
