"""Whole decodes of the bundled pair at another pair's size: plain, trees of the field, equal growth, transformers."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rivals.trees import TreeBench, tree_systems

from cuda_check.correctness import AHEAD
from cuda_check.machine import time_calls
from cuda_check.models import modes, prompts, steps_of, tokenizer, widened
from cuda_check.notes import Notes
from yggdrasil.drafters import NGramDrafter
from yggdrasil.engine.assembly import Assembly, assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.policy.costs import StepCosts, lower_envelope
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import TreeShape

RIVALS = ("egt", "sequence", "k-ary", "sequoia", "opt-tree", "eagle-2")
SCHEDULES = {  # beside the usual one, by which all trees are decoded
    "in order": {"depth_prediction": "informed"},  # no draft is launched behind the pass
    **AHEAD,
}
FIXED = (TreeShape(1, 4, 8), TreeShape(2, 4, 8), TreeShape(4, 6, 16), TreeShape(4, 8, 32), TreeShape(8, 8, 64))


def decodes(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    run = _Run(notes, device, tiny=tiny)
    notes.attempt("build the pair", run.build, seconds=20, always=True)
    if not run.is_built:
        return
    for mode in modes()[-1:] if tiny else modes()[::-1]:
        notes.attempt(f"plain, {mode}", partial(run.plain, mode), seconds=10)
    notes.attempt("step ms", run.costs, seconds=15, always=True)
    for shape in FIXED[:1] if tiny else FIXED:
        notes.attempt(f"equal growth {shape}", partial(run.tree, shape), seconds=5)
    for name, variants in list(SCHEDULES.items())[-1 if tiny else 0 :]:
        notes.attempt(f"schedule {name}", partial(run.schedule, variants), seconds=10)
    notes.attempt("n-gram", run.ngram, seconds=8)
    for budget in (4,) if tiny else (16, 64):
        for name in RIVALS[:2] if tiny else RIVALS:
            notes.attempt(f"tree {name} of {budget}", partial(run.rival, name, budget), seconds=5)


def transformers(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    """Plain, assisted and prompt look-up decoding of transformers with the same weights."""
    run = _Run(notes, device, tiny=tiny)
    notes.attempt("build the pair", run.build, seconds=20, always=True)
    if not run.is_built:
        return
    notes.attempt("transformers generate", run.transformers, seconds=8)
    for name, options in _ASSISTED.items():
        notes.attempt(f"transformers {name}", partial(run.transformers, **options), seconds=8)
    notes.attempt("transformers static cache, compiled", run.transformers_compiled, seconds=25)


_ASSISTED = {"assisted": {"is_assisted": True}, "prompt look-up": {"prompt_lookup_num_tokens": 8}}
_SLOW_ROUNDS = 1  # of what the host bounds at some 30 ms a token, which varies little


class _Run:
    """The pair, what is decoded with it, and the tokens of plain decoding."""

    is_built = False

    def __init__(self, notes: Notes, device: torch.device, *, tiny: bool) -> None:
        self._notes, self._device, self._tiny = notes, device, tiny
        self._count = 4 if tiny else 96
        self._texts = prompts()[:1] if tiny else prompts()[:4]
        self._shapes = Shapes(
            max_length=300, draft_widths=(1, 2, 4, 8), max_depth=8, candidates=8, verify_widths=(1, 8, 16, 32, 64),
            prefill_widths=(16, 96),
        )  # fmt: skip
        if tiny:
            self._shapes = Shapes(
                max_length=160, draft_widths=(1,), max_depth=4, candidates=8, verify_widths=(1, 4, 8),
                prefill_widths=(96,),
            )  # fmt: skip
        self._reference: list[list[int]] = []
        self._assemblies: dict[str, Assembly] = {}
        self._bench: TreeBench | None = None

    def build(self) -> dict[str, Any]:
        begun = time.monotonic()
        self._target = widened("target", "llama2-7b", self._device, tiny=self._tiny)
        self._drafter = widened("drafter", "llama-68m", self._device, tiny=self._tiny)
        self.is_built = True
        return {
            "seconds": round(time.monotonic() - begun, 1),
            "target": _size(self._target),
            "drafter": _size(self._drafter),
        }

    def plain(self, mode: str) -> dict[str, Any]:
        decoder = Decoder(self._assembly(mode), tokenizer(), PLAIN_POLICY, frozenset())
        return self._decode(decoder, rounds=_SLOW_ROUNDS if mode == "eager" else 3)

    def tree(self, shape: TreeShape) -> dict[str, Any]:
        shape = TreeShape(1, 3, 8) if self._tiny else shape
        return self._decode(Decoder(self._assembly(modes()[-1]), tokenizer(), FixedPolicy(shape), frozenset()))

    def schedule(self, variants: Mapping[str, str]) -> dict[str, Any]:
        """The third tree under another schedule; figure 12 of the paper compares such."""
        stages = Schedule.of(variants).labels
        with steps_of(modes()[-1], self._device) as backend:
            assembly = assemble(self._target, self._drafter, self._shapes, backend, stages=stages)
            policy = FixedPolicy(TreeShape(1, 3, 8) if self._tiny else FIXED[2])
            return self._decode(Decoder(assembly, tokenizer(), policy, frozenset()))

    def ngram(self) -> dict[str, Any]:
        with steps_of(modes()[-1], self._device) as backend:
            assembly = assemble(self._target, NGramDrafter(), self._shapes, backend)
            policy = FixedPolicy(TreeShape(1, 4, self._shapes.verify_widths[1]))
            return self._decode(Decoder(assembly, tokenizer(), policy, frozenset()))

    def costs(self) -> dict[str, Any]:
        """Milliseconds of passes and draft levels, from which Sequoia and the objective choose."""
        assembly = self._assembly(modes()[-1])
        target, drafter, tree = assembly.engine.target, assembly.engine.drafter, assembly.engine.tree
        assert isinstance(target, CapturedTarget)
        found: dict[str, Any] = {"verify_ms": {}, "draft_ms": {}}
        with torch.inference_mode():
            for width in self._shapes.verify_widths:
                capture = target.captures["plain", 1] if width == 1 else target.captures["verify", width]
                capture.prepare()
                target.text.pretend([1] * 128, 128)
                tree.plant(1)
                _ = target.plain(1) if width == 1 else target.verify(width)
                found["verify_ms"][width] = self._median(capture)
            drafter.pretend_context(128, 1)
            drafter.head()
            found["head_ms"] = self._median(drafter.head)
            for width in self._shapes.draft_widths:
                short, long = (drafter.levels.capture(width, depth) for depth in (1, 4))
                short.prepare(), long.prepare()
                drafter.grow(width, 4)
                found["draft_ms"][width] = max((self._median(long) - self._median(short)) / 3, 1e-4)
        assembly.forget()
        self._costs = found
        return found

    def rival(self, name: str, budget: int) -> dict[str, Any]:
        bench = self._tree_bench()
        (system,) = tree_systems(bench, [name], [budget])
        return self._measure(lambda text: (lambda c: (c.tokens, c.tpot_ms, c.decoded / max(c.passes, 1)))(
            system.decode(text, self._count)), rounds=2)  # fmt: skip

    def _tree_bench(self) -> TreeBench:
        if self._bench is None:
            found = self._costs
            envelope = {width: ms for width, (ms, _) in lower_envelope(found["verify_ms"]).items()}
            costs = StepCosts(found["head_ms"], found["draft_ms"], envelope, 0.1, envelope[1])
            decoder = Decoder(self._assembly(modes()[-1]), tokenizer(), PLAIN_POLICY, frozenset())
            with steps_of(modes()[-1], self._device):
                self._bench = TreeBench(decoder, (4,) if self._tiny else (16, 64), costs)
                self._bench.calibrate(prompts()[10:12] if not self._tiny else prompts()[1:2], 6 if self._tiny else 48)
        return self._bench

    def transformers(self, *, is_assisted: bool = False, **options: Any) -> dict[str, Any]:
        """transformers' decoding on the same weights; ``options`` are generate's."""
        from yggdrasil.runtime.attention import own_attention

        models = [self._target.model, self._drafter.model]
        with own_attention(models[0]), own_attention(models[1]):
            extra = {"assistant_model": models[1]} if is_assisted else {}
            return self._measure(partial(self._generate, {**options, **extra}), rounds=_SLOW_ROUNDS)

    def transformers_compiled(self) -> dict[str, Any]:
        """Static cache and compiled forward, as transformers' own documentation advises."""
        if self._device.type != "cuda":
            return {"skipped": "compiles for a GPU"}
        from torch._inductor import config

        config.cpp.cxx = (
            None,
            "g++",
        )  # a graph of its may compute on the processor; our own operators are built by now
        return self.transformers(cache_implementation="static")

    def _generate(self, options: dict[str, Any], text: Sequence[int]) -> tuple[list[int], float, float]:
        ids = torch.tensor([list(text)]).to(self._device)
        times, tokens, more = [], [], 1 if self._tiny else self._count
        for count in (1, 1 + more):
            self._wait()
            begun = time.perf_counter()
            output = self._target.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None,
                pad_token_id=0, **options,
            )  # fmt: skip
            self._wait()
            times.append((time.perf_counter() - begun) * 1e3)
            tokens = output[0, len(text) :].tolist()
        return tokens, (times[1] - times[0]) / more, 1.0

    def _assembly(self, mode: str) -> Assembly:
        if mode not in self._assemblies:
            with steps_of(mode, self._device) as backend:
                self._assemblies[mode] = made = assemble(self._target, self._drafter, self._shapes, backend)
                for runner in (made.target, made.drafter):
                    for step in runner.defined if runner is not None else ():
                        runner.step(*step)  # decided here; compiled and recorded when first used
        return self._assemblies[mode]

    def _decode(self, decoder: Decoder, rounds: int = 3) -> dict[str, Any]:
        def one(text: Sequence[int]) -> tuple[list[int], float, float]:
            found = decoder.generate(text, max_new_tokens=self._count, ignore_eos=True)
            stages.append(
                {name: round(ms / max(found.metrics.iterations, 1), 4) for name, ms in found.metrics.stage_ms.items()}
            )
            shares.append(found.metrics.overhead_share)
            return found.tokens, found.metrics.tpot_ms, found.metrics.aal

        stages: list[dict[str, float]] = []
        shares: list[float] = []
        result = self._measure(one, rounds=rounds)
        return {**result, "stage_ms": stages[-1], "overhead_share": round(statistics.median(shares), 4)}

    def _measure(
        self, one: Callable[[Sequence[int]], tuple[list[int], float, float]], *, rounds: int = 3
    ) -> dict[str, Any]:
        """Medians over ``rounds`` of the prompts, after the first prompt twice: it compiles, then records."""
        begun = time.monotonic()
        for _ in range(0 if self._tiny else 2):
            one(self._texts[0])
        ready = time.monotonic() - begun
        found = [one(text) for _ in range(1 if self._tiny else rounds) for text in self._texts]
        tokens = [each[0] for each in found[: len(self._texts)]]
        self._reference = self._reference or tokens
        return {
            "ms_per_token": round(statistics.median(each[1] for each in found), 4),
            "samples_ms": [round(each[1], 4) for each in found],
            "tokens_per_pass": round(statistics.fmean(each[2] for each in found), 3),
            "same_as_plain": [_same(ours, theirs) for ours, theirs in zip(tokens, self._reference, strict=False)],
            "ready_s": round(ready, 1),
        }

    def _median(self, launch: Callable[[], object]) -> float:
        return round(statistics.median(time_calls(launch, self._device, 1 if self._tiny else 30)), 4)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _size(loaded: LoadedModel) -> int:
    return sum(parameter.numel() for parameter in loaded.model.parameters())


def _same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def summary(results: dict[str, Any]) -> list[str]:
    """Lines for a person: milliseconds a token, four figures a line."""
    rows = [
        f"{key} {value['ms_per_token']:.3f}"
        for key, value in results.items()
        if isinstance(value, dict) and "ms_per_token" in value
    ]
    return [f"  ms a token: {', '.join(rows[first : first + 4])}" for first in range(0, len(rows), 4)]
