"""How commands open a decoder."""

import sys
from typing import TYPE_CHECKING, Literal

from yggdrasil.cli.options import Dtype

if TYPE_CHECKING:
    from yggdrasil.compiler.compiled import Backend
    from yggdrasil.engine.decoder import Decoder


def open_decoder(
    source: str,
    dtype: Dtype | None,
    drafter: Literal["plan", "ngram"] = "plan",
    *,
    force_machine: bool,
    backend: "Backend | None" = None,
    max_length: int | None = None,
    chat: bool = False,
    grows_table: bool = False,
) -> "Decoder":
    """The decoder of a plan or a model, of a chat model where it is to ``chat``.

    What its costs do not cover is said on standard error.
    """
    from yggdrasil.cli.progress import PhaseProgress
    from yggdrasil.pretrained import Decoder

    with PhaseProgress() as progress:
        decoder = Decoder.from_pretrained(
            source, drafter=None if drafter == "plan" else drafter, dtype=dtype, backend=backend,
            force_machine=force_machine, max_length=max_length, chat=chat, reporter=progress,
        )  # fmt: skip
    if grows_table:
        decoder.grow_table()
    if max_length is not None and decoder.plan is not None and max_length > decoder.plan.shapes.max_length:
        say(
            f"the plan was calibrated for {decoder.plan.shapes.max_length} tokens: its costs are kept for "
            f"{max_length}, so the output is exact and the chosen trees may not be the fastest"
        )
    return decoder


def say(sentence: str) -> None:
    """One sentence beside the output."""
    print(f"yggdrasil: {' '.join(sentence.splitlines())}", file=sys.stderr, flush=True)
