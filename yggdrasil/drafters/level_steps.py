"""The levels below a root: the steps "grow" and "finish" one after another, or all of them as one capture."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from yggdrasil.runtime.buffers import HostBuffer
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.runner import ModelRunner


class LevelSteps:
    """Runs the level steps that ``runner`` defines.

    Args:
        place: [2] int64, which the steps read: the root's position or slot, and the number of a level's first node.
    """

    def __init__(self, runner: ModelRunner, place: HostBuffer) -> None:
        self._runner, self._place = runner, place
        self._captures: dict[tuple[int, int], Capture] = {}

    def run(self, root: int, width: int, depth: int) -> None:
        """Attach ``depth`` levels of ``width`` nodes; the nodes of the last level are not read."""
        if self._runner.recorder is not None:
            self._place.write(root)
            self.capture(width, depth)()
            return
        grow = self._runner.step("grow", width)
        for level in range(depth - 1):
            self._place.write(root, 1 + level * width)
            grow()
        self._place.write(root, 1 + (depth - 1) * width)
        self._runner.step("finish", width)()

    def capture(self, width: int, depth: int) -> Capture:
        """All levels as one capture; the number of the next level's first node is counted on the device."""
        found = self._captures.get((width, depth))
        if found is None:
            assert self._runner.recorder is not None
            grow, finish = self._runner.step("grow", width), self._runner.step("finish", width)
            first = self._place.tensor[1:]

            def levels() -> Sequence[Tensor]:
                first.fill_(1)
                for _ in range(depth - 1):
                    grow()
                    first.add_(width)
                return finish()

            found = self._captures[width, depth] = self._runner.recorder.capture(levels)
        return found

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Every capture that drafts of ``depths`` launch, those of the other steps of the runner among them.

        To be prepared between requests, as that runs each once.
        """
        for name, width in self._runner.defined:
            if name == "grow":
                for depth in depths:
                    yield self.capture(width, depth)
            elif name != "finish":
                yield self._runner.captured(name, width)
