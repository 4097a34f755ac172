"""``yggdrasil report``: reports measurements, predictions and choices, as a page, text or tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from yggdrasil.arguments import check_package
from yggdrasil.cli import checks
from yggdrasil.cli.open_decoder import plan_of, say
from yggdrasil.cli.shared_options import ChatOption, ForceOption, ModelArgument
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.policy.fixed import Policy
    from yggdrasil.reports.facts import Facts

USUAL_LIMIT = 3  # prompts
PROMPT_TOKENS = 256  # a longer prompt is cut to so many last tokens


def report(
    name: ModelArgument,
    out: Annotated[
        Path | None, typer.Option(callback=checks.output_file, help="Write a self-contained HTML page to this file.")
    ] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print the report.")] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", callback=checks.output_folder, help="Write every table into this folder.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(callback=checks.input_file, help="JSON lines with a prompt field: decode some for example trees."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=f"Prompts to decode. Default: {USUAL_LIMIT}.")] = None,
    chat: ChatOption = False,
    force_machine: ForceOption = False,
) -> None:
    """Report on a plan: step costs, predictions, objective, timelines, searched plans, example trees."""
    from yggdrasil.artifacts import current_machine, resolve_plan, write_atomic

    if out is None and csv is None and not as_text:
        raise YggdrasilError("nothing to do; give --out FILE for the page, --text, or --csv DIR")
    if prompts is None and (limit is not None or chat):
        raise YggdrasilError("--limit and --chat are for the prompts of --prompts, which is not given")
    if out is not None:
        check_package("plotly", "the HTML page", "report")
    path = resolve_plan(plan_of(name), current_machine(), force=force_machine)

    from yggdrasil.reports.facts import Facts  # imported only now: PyTorch takes seconds
    from yggdrasil.reports.folder import write_tables
    from yggdrasil.reports.page import build_page

    facts = Facts.load(path)
    if prompts is not None:
        facts = _with_trees(facts, path, prompts, limit or USUAL_LIMIT, chat=chat, force_machine=force_machine)
    if facts.missing_profile is not None and not as_text:
        say(facts.missing_profile)
    if out is not None:
        write_atomic(out, build_page(facts).encode())
        print(out)
    if csv is not None:
        write_tables(facts.tables(), csv)
        print(csv)
    if as_text:
        from yggdrasil.reports.text import show

        show(facts)


def _with_trees(facts: "Facts", plan: Path, prompts: Path, limit: int, *, chat: bool, force_machine: bool) -> "Facts":
    from dataclasses import replace

    import pandas as pd

    from yggdrasil.artifacts import write_csv
    from yggdrasil.bench.compare import encode_one
    from yggdrasil.engine.decoder import Decoder
    from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy
    from yggdrasil.prompts import read_prompts
    from yggdrasil.reports.trees import record_trees

    requests = read_prompts(prompts, limit, chat=chat)  # before a model is loaded
    decoder = Decoder.from_plan(plan, force_machine=force_machine)
    texts = [encode_one(decoder, prompt, PROMPT_TOKENS) for prompt in requests]
    recorded = []
    # A policy may decode plainly; fixed shapes give trees: the plan's, and one that is pruned before verification.
    policies: list[Policy] = [ModelFreePolicy(facts.plan.shapes.verify_widths[-1])]
    if facts.learned is not None:
        policies = [FixedPolicy(shape) for shape in dict.fromkeys((facts.best_tree(), facts.best_pruned_tree()))]
    for decoder.policy in policies:
        recorded.append(record_trees(decoder, texts, each=1))
    trees = pd.concat(recorded, ignore_index=True)
    if facts.profile.is_dir():
        write_csv(facts.profile / "example_trees.csv", "example-trees", 1, trees)
    return replace(facts, trees=trees)
