"""The commands of the ``yggdrasil`` program."""

import platform
from importlib.metadata import version
from typing import Annotated

import typer

import yggdrasil
from yggdrasil.cli.benchmarks.command import DefaultCommand, bench
from yggdrasil.cli.benchmarks.figures import figures
from yggdrasil.cli.benchmarks.rules import exactness, rules
from yggdrasil.cli.cache import cache
from yggdrasil.cli.calibrate import calibrate
from yggdrasil.cli.chat import chat
from yggdrasil.cli.export import export
from yggdrasil.cli.generate import generate
from yggdrasil.cli.parity import parity
from yggdrasil.cli.plans import plans
from yggdrasil.cli.profile import profile
from yggdrasil.cli.report import report
from yggdrasil.cli.search import search
from yggdrasil.cli.serve import serve
from yggdrasil.cli.train import train

DECODING, GAINING, MEASURING, KEPT = "Decode", "Make it faster", "Measure", "Stored files"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command, panel in (
    (chat, DECODING), (generate, DECODING), (serve, DECODING),
    (calibrate, GAINING), (search, GAINING), (train, GAINING),
):  # fmt: skip
    app.command(rich_help_panel=panel)(command)

bench_app = typer.Typer(cls=DefaultCommand, no_args_is_help=True)
bench_app.command(DefaultCommand.NAME)(bench)
bench_app.command()(figures)
bench_app.command()(rules)
bench_app.command()(exactness)
app.add_typer(
    bench_app, name="bench", rich_help_panel=MEASURING,
    help="Measure the speed-up over plain decoding: `bench MODEL --prompts FILE`.",
)  # fmt: skip

for command, panel in (
    (report, MEASURING), (profile, MEASURING), (parity, MEASURING), (export, MEASURING), (plans, KEPT), (cache, KEPT),
):  # fmt: skip
    app.command(rich_help_panel=panel)(command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        beside = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        print(f"yggdrasil {yggdrasil.__version__} ({beside}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def program(
    shows_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit."),
    ] = False,
) -> None:
    """Speculative tree decoding of language models: faster, with exactly the model's own output.

    MODEL is a checkpoint folder, a .gguf file or a hub id (owner/name), or the name of a plan from `calibrate`.
    """
