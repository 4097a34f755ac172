"""Count the package's Python files that one decoding iteration enters, for each kind of iteration.

python scripts/iteration_files.py [PLAN]
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.iteration import Iteration
from yggdrasil.engine.loop import DecodeLoop
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

PACKAGE = Path(sys.modules["yggdrasil"].__file__ or "").parent
PROMPT = "def quicksort(values):\n    if len(values) <= 1:\n        return values\n"


@contextmanager
def entered_files(found: set[str]) -> Iterator[None]:
    """Add to ``found`` the package's files in which a function is called meanwhile."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def files_by_kind(plan: str, num_tokens: int = 64) -> dict[str, set[str]]:
    """Files entered by iterations of each kind: plain, model_free, drafted, and drafted with a fixed shape.

    The first iteration of a shape is left out: it makes objects that later ones use.
    """
    decoder = Decoder.from_plan(plan, force_machine=True)
    for _ in range(3):  # what is made once, at the first step of a width
        decoder.generate(PROMPT, max_new_tokens=num_tokens, ignore_eos=True)
    found: dict[str, set[str]] = {}
    made: set[TreeShape] = set()
    by = ""
    run = DecodeLoop.iterate

    def profiled(self: DecodeLoop, state: Iteration, *arguments: Any) -> Iteration:
        files: set[str] = set()
        with entered_files(files):
            following = run(self, state, *arguments)
        assert state.decision is not None
        if state.shape in made:
            found.setdefault(state.decision.kind + by, set()).update(files)
        made.add(state.shape)
        return following

    DecodeLoop.iterate = profiled  # type: ignore[method-assign]
    try:
        decoder.generate(PROMPT, max_new_tokens=num_tokens, ignore_eos=True)
        # The policy may draft in no iteration, so a second text is drafted by a fixed shape.
        by = ", fixed shape"
        drafting = Decoder(decoder.assembly, decoder.tokenizer, FixedPolicy(TreeShape(4, 3, 8)), frozenset())
        drafting.generate(PROMPT, max_new_tokens=num_tokens, ignore_eos=True)
    finally:
        DecodeLoop.iterate = run  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    for kind, files in sorted(files_by_kind(*sys.argv[1:] or ["tiny"]).items()):
        print(f"{kind}: {len(files)} files")
        for name in sorted(files):
            print(f"    {name}")
