"""Ask a small chat model three questions, and compare with decoding one token at a time; `scripts/demo` runs it.

The model is SmolLM2-135M-Instruct, fetched once into the user's cache. Where it cannot be had, the bundled pair goes on
with a few texts instead.
"""

from collections.abc import Sequence
from pathlib import Path

from fetch_models import fetch_model
from rich.console import Console

from yggdrasil.artifacts import current_machine, list_plans, search_roots
from yggdrasil.bench.compare import Comparison, compare
from yggdrasil.bench.record import drafter_names
from yggdrasil.bench.summary import summarise
from yggdrasil.cli import run_script
from yggdrasil.cli.progress import PhaseProgress, show_comparison
from yggdrasil.engine import decoder as engine
from yggdrasil.engine.request import Generation
from yggdrasil.errors import YggdrasilError
from yggdrasil.pretrained import Decoder
from yggdrasil.prompts import HELD_OUT_CHAT_PROMPTS, Prompt, encode_prompt, read_prompts

BUNDLED = Path(__file__).resolve().parents[1] / "yggdrasil" / "assets" / "tiny"
QUESTIONS = ("heldout-question-1", "heldout-translation-1", "heldout-code-2")
COMPARED = (*QUESTIONS, "heldout-maths-1")
TOKENS = 128
DRAFTERS = ("yggdrasil:smollm2-135m-instruct", "text", "table")
_console = Console(stderr=True)


def main() -> None:
    """Prepare, answer three prompts, compare on these and one more; the last lines are the result."""
    decoder, prompts = open_model()
    for prompt in prompts[: len(QUESTIONS)]:
        answer(decoder, prompt)
    say("Comparing with decoding one token at a time")
    print(verdict(compare(decoder, prompts, TOKENS, show_comparison, ignore_eos=False)))


def open_model() -> tuple[engine.Decoder, list[Prompt]]:
    """The real model with questions, or the bundled pair with texts to go on with."""
    try:
        file = fetch_model("smollm2-135m")
    except YggdrasilError as error:
        say(
            f"{error}. So this is the bundled pair, which goes on with texts and is far too small to be asked for facts"
        )
        prompts = BUNDLED / "prompts.jsonl"
        return bundled_pair(prompts), read_prompts(prompts, len(COMPARED))
    with PhaseProgress() as progress:
        decoder = Decoder.from_pretrained(file, drafter=DRAFTERS, reporter=progress)
    say(f"Drafts come from {drafter_names(decoder.assembly.engine)}")
    by_id = {prompt.id: prompt for prompt in read_prompts(HELD_OUT_CHAT_PROMPTS, chat=True)}
    return decoder, [by_id[name] for name in COMPARED]


def bundled_pair(prompts: Path) -> engine.Decoder:
    """The decoder of the bundled pair, calibrated into the user's cache if no plan of it fits this machine."""
    if not any(entry.fits(current_machine()) for entry in list_plans("tiny")):
        say("Preparing the bundled pair for this machine (once, a few minutes)")
        run_program(
            "calibrate", BUNDLED / "target", "--drafter", BUNDLED / "drafter", "--prompts", prompts,
            "--name", "tiny", "--quick", "--root", search_roots()[-1],
        )  # fmt: skip
    with PhaseProgress() as progress:
        return Decoder.from_pretrained("tiny", reporter=progress)


def run_program(*arguments: object) -> None:
    """Run a command of ``yggdrasil`` in this process, which has imported what it needs."""
    import typer

    from yggdrasil.cli.app import make_app

    typer.main.get_command(make_app()).main(list(map(str, arguments)), prog_name="yggdrasil", standalone_mode=False)


def answer(decoder: engine.Decoder, prompt: Prompt) -> None:
    """Print a prompt and, as it comes, what the model says."""
    print(f"\n> {prompt.prompt}\n", flush=True)
    for piece in decoder.start(encode_prompt(decoder.tokenizer, prompt), max_new_tokens=TOKENS):
        print(piece, end="", flush=True)
    print(flush=True)


def verdict(results: Sequence[Comparison]) -> str:
    """What the comparison says, for a person: times of all prompts together, and whether the tokens are the same."""
    summary, count = summarise(results), len(results)
    ours, plain = mean_ms([result.tree for result in results]), mean_ms([result.plain for result in results])
    if summary["matched"] == count:
        same = f"and every token was the same ({count} of {count} answers)."
    elif summary["faults"]:
        same = f"but {summary['faults']} of {count} answers differ, which is a fault: please report it."
    else:
        same = (
            f"and the tokens were the same in {summary['matched']} of {count} answers; where they were not, two tokens "
            "were as good as equal, and rounding decided."
        )
    return (
        f"\nYggdrasil answered at {ours:.1f} ms a token where plain decoding takes {plain:.1f}: "
        f"{summary['total_speedup']:.2f} times as fast, {same}\n"
        f"Of these tokens, {summary['repeats']:.0%} repeat an earlier place of their text; the more do, the more is "
        "gained."
    )


def mean_ms(answers: Sequence[Generation]) -> float:
    """Milliseconds a token over all answers together, the first token of each left out."""
    tokens = [len(found.tokens) - 1 for found in answers]
    total = sum(found.metrics.tpot_ms * count for found, count in zip(answers, tokens, strict=True))
    return total / max(sum(tokens), 1)


def say(text: str) -> None:
    """A note on standard error."""
    _console.print(f"==> {text}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_script(main, "demo")
