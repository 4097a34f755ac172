"""One widened pair for ``check_cuda.py``: its models in memory, its decoders, and what is asked of them."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from yggdrasil import native
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.widening import ModelShape, read_shape, resolve_shape, widen_in_memory
from yggdrasil.compiler.compiled import _eager
from yggdrasil.engine.build import Assembly, assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.policy import PLAIN_POLICY, FixedPolicy, Policy
from yggdrasil.errors import YggdrasilError
from yggdrasil.native.portable import PORTABLE, keep_rows
from yggdrasil.predictor.bundle import Learned
from yggdrasil.runtime import runner
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.selfcheck import check_tree_attention
from yggdrasil.scheduling.plan import Plan, Shapes
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.step_costs import StepCosts, lower_envelope

ROOT = Path(__file__).resolve().parent.parent
BUNDLED = ROOT / "yggdrasil" / "assets" / "tiny"
SIZES_OF = {"llama2-7b": ("llama2-7b", "llama-68m"), "llama3-8b": ("llama3-8b", "llama3-1b")}
CONTEXTS = (128, 512, 1024)


class Pair:
    """the bundled pair at another pair's shape: real acceptance at a real model's cost."""

    def __init__(self, name: str, device: torch.device, *, tiny: bool) -> None:
        self._device, self._tiny = device, tiny
        shapes, self._learned = _bundled_calibration()
        begun = time.monotonic()
        self._target, self._drafter = (
            self._widened(role, size) for role, size in zip(("target", "drafter"), SIZES_OF[name], strict=True)
        )
        self._built_in = time.monotonic() - begun
        self._tokenizer = load_tokenizer(BUNDLED / "target")
        lines = (BUNDLED / "prompts.jsonl").read_text().splitlines()
        texts = [self._tokenizer(json.loads(line)["prompt"])["input_ids"][-128:] for line in lines]
        self._prompts = texts[: 1 if tiny else 4]
        self._text = [token for text in texts for token in text]
        self._num_tokens = 6 if tiny else 64
        shapes = replace(shapes, max_length=1400, prefill_widths=(128,))
        self._shapes = replace(shapes, max_length=300, prefill_widths=(16,)) if tiny else shapes
        self._contexts = (32,) if tiny else CONTEXTS
        self._reference: list[list[int]] = []
        self._costs: dict[str, Any] = {}
        self._tpot: dict[TreeShape, float] = {}
        self._plain: dict[str, Any] = {}
        self._plain_ms: dict[str, float] = {}
        with uncompiled():
            self._captured = self._assemble("cudagraph")
        self._compiled = self._assemble("cudagraph")

    def _widened(self, role: str, size: str) -> LoadedModel:
        narrow = read_shape(BUNDLED / role)
        shape = _tiny_shape(narrow) if self._tiny else resolve_shape(narrow, size, {})
        model = widen_in_memory(BUNDLED / role, shape, self._device)
        loaded = prepare_model(model, size, 1, pack=False)
        check_tree_attention(loaded)
        return loaded

    def _assemble(self, backend: str) -> Assembly:
        knots = None if self._learned is None else torch.from_numpy(self._learned.acceptance.knots.copy())
        assembly = assemble(self._target, self._drafter, self._shapes, backend, knots=knots)
        for model in (assembly.target, assembly.drafter):
            for step in model.defined:
                model.step(*step)  # decided now, so that ``uncompiled`` holds; compiled when first run
        return assembly

    def describe(self) -> dict[str, Any]:
        """Parameters, bytes and how long making them took."""
        return {
            "target_parameters": _num_parameters(self._target),
            "drafter_parameters": _num_parameters(self._drafter),
            "target_bytes_a_token": _step_bytes(self._target),
            "seconds_to_build": round(self._built_in, 1),
            "shapes": str(self._shapes),
            "tokens": self._num_tokens,
            "prompts": len(self._prompts),
        }

    # ==== decoding ====

    def plain(self) -> dict[str, Any]:
        self._plain = self._decode(self._captured, PLAIN_POLICY)
        return self._plain

    def shapes_to_try(self) -> list[TreeShape]:
        """A chain, and trees from small to large."""
        if self._tiny:
            return [TreeShape(self._shapes.draft_widths[-1], 2, self._shapes.verify_widths[2])]
        widths = self._shapes.draft_widths, self._shapes.verify_widths
        wanted = [(1, 4, 4), (1, 4, 8), (2, 4, 8), (4, 4, 16), (4, 8, 32), (8, 8, 64)]
        return [TreeShape(w, d, v) for w, d, v in wanted if w in widths[0] and v in widths[1]]

    def tree(self, shape: TreeShape) -> dict[str, Any]:
        result = self._decode(self._captured, FixedPolicy(shape))
        self._tpot[shape] = result["tpot_ms"]
        return result

    def objective(self) -> dict[str, Any]:
        """The policy of the bundled plan's acceptance tables over the costs measured here."""
        if self._learned is None:
            return {"skipped": "the bundled pair's calibration could not be read; see the log"}
        at = self._costs[str(self._contexts[0])]
        verify = {width: ms for width, (ms, _) in lower_envelope(at["verify_ms"]).items()}
        plain_ms = self._plain["tpot_ms"]
        overhead_ms = plain_ms * self._plain["overhead_share"]
        costs = StepCosts(at["head_ms"], at["draft_ms"], verify, overhead_ms, plain_ms)
        learned = self._learned
        policy = ObjectivePolicy(
            {self._contexts[0]: costs}, learned.ratios, learned.mean_survival, None, lift=learned.lift
        )
        self._captured.warm()
        return self._decode(self._captured, policy)

    def compiled_plain(self) -> dict[str, Any]:
        return self._decode(self._compiled, PLAIN_POLICY)

    def compiled_tree(self) -> dict[str, Any]:
        return self._decode(self._compiled, FixedPolicy(self._best_shape()))

    def portable_tree(self) -> dict[str, Any]:
        with portable_operators(), uncompiled():
            return self._decode(self._assemble("cudagraph"), FixedPolicy(self._best_shape()), num_prompts=1)

    def eager_plain(self) -> dict[str, Any]:
        return self._decode(self._assemble("eager"), PLAIN_POLICY, num_prompts=1)

    def eager_tree(self) -> dict[str, Any]:
        return self._decode(self._assemble("eager"), FixedPolicy(self._best_shape()), num_prompts=1)

    def transformers_generate(self) -> dict[str, Any]:
        """transformers' own eager decoding with its dynamic cache, on the same weights."""
        model = self._target.model
        prompt = torch.tensor([self._prompts[0]], device=self._device)
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        times = []
        model.set_attn_implementation("sdpa")
        try:
            for count in (2, 2 + self._num_tokens):
                self._synchronize()
                begun = time.perf_counter()
                model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, **settings)
                self._synchronize()
                times.append((time.perf_counter() - begun) * 1e3)
        finally:
            model.set_attn_implementation("yggdrasil_tree")
        return {"tpot_ms": (times[1] - times[0]) / self._num_tokens}

    def compiled_steps(self) -> dict[str, bool]:
        """Which steps the compiler really made; the others ran operator by operator, or not at all."""
        models = {"target": self._compiled.target, "drafter": self._compiled.drafter}
        return {
            f"{role} {name} {width}": getattr(step, "is_compiled", False)
            for role, model in models.items()
            for (name, width), step in model._steps.items()
        }

    def _best_shape(self) -> TreeShape:
        return min(self._tpot, key=self._tpot.__getitem__) if self._tpot else self.shapes_to_try()[0]

    def _decode(self, assembly: Assembly, policy: Policy, num_prompts: int | None = None) -> dict[str, Any]:
        """Medians over the prompts, after the first prompt twice: it compiles, then records."""
        decoder = Decoder(assembly, self._tokenizer, policy, frozenset())
        begun = time.monotonic()
        for _ in range(2):
            decoder.generate(self._prompts[0], max_new_tokens=min(self._num_tokens, 24))
        ready_in = time.monotonic() - begun
        prompts = self._prompts[:num_prompts]
        results = [decoder.generate(prompt, max_new_tokens=self._num_tokens) for prompt in prompts]
        tokens = [result.tokens for result in results]
        if not self._reference:
            self._reference = tokens
        same = [_common_prefix(ours, theirs) for ours, theirs in zip(tokens, self._reference, strict=False)]
        metrics = [result.metrics for result in results]
        stages: dict[str, float] = {}
        for metric in metrics:
            for stage, ms in metric.stage_ms.items():
                stages[stage] = stages.get(stage, 0.0) + ms / sum(m.iterations for m in metrics)
        return {
            "tpot_ms": statistics.median(metric.tpot_ms for metric in metrics),
            "samples_ms": [metric.tpot_ms for metric in metrics],
            "aal": statistics.fmean(metric.aal for metric in metrics),
            "overhead_share": statistics.median(metric.overhead_share for metric in metrics),
            "stage_ms_an_iteration": stages,
            "ttft_ms": [metric.ttft_ms for metric in metrics],
            "tokens_as_plain": same,
            "seconds_to_get_ready": round(ready_in, 1),
        }

    # ==== single steps ====

    def step_times(self) -> dict[str, Any]:
        """Milliseconds of one replay, by context: verification of W tokens, a draft level of width W, the head."""
        for context in self._contexts:
            self._costs[str(context)] = self._step_times_at(context)
        return self._costs

    @torch.inference_mode()
    def _step_times_at(self, context: int) -> dict[str, Any]:
        engine = self._captured.engine
        target, drafter, depths = engine.target, engine.drafter, (1, min(4, self._shapes.max_depth))
        text = self._fill(self._captured, context)
        verify = {1: self._replay_ms(lambda: target.plain(text[-1]), target.captures["plain", 1])}
        drafter.begin(text[:1])
        drafter.extend(text[1:], {})
        drafter.head(engine.tree)
        head = self._replay_ms(lambda: drafter.head(engine.tree), self._captured.drafter.captured(
            "head", drafter.head_widths[0]))  # fmt: skip
        draft = {}
        for width in self._shapes.draft_widths:
            short, long = (
                self._replay_ms(lambda w=width, d=depth: drafter.grow(engine.tree, w, d), drafter.draft(width, depth))
                for depth in depths
            )
            draft[width] = max((long - short) / max(depths[1] - depths[0], 1), 1e-4)
        for width in self._shapes.verify_widths:
            if width > 1:
                verify[width] = self._replay_ms(lambda w=width: target.verify(w), target.captures["verify", width])
        return {"verify_ms": verify, "draft_ms": draft, "head_ms": head}

    @torch.inference_mode()
    def compiled_plain_ms(self) -> dict[str, float]:
        """One compiled plain step, by context."""
        target = self._compiled.engine.target
        for context in self._contexts:
            text = self._fill(self._compiled, context)
            capture = target.captures["plain", 1]
            self._plain_ms[str(context)] = self._replay_ms(lambda t=text: target.plain(t[-1]), capture)
        return self._plain_ms

    def bandwidth_shares(self, gb_per_s: float) -> dict[str, Any]:
        """Share of the copy bandwidth that a plain token reaches: bytes that must be read over time."""
        tables = {"captured": {c: at["verify_ms"][1] for c, at in self._costs.items()}, "compiled": self._plain_ms}
        shares: dict[str, Any] = {}
        for kind, by_context in tables.items():
            for context, ms in by_context.items():
                cache = self._captured.target.cache
                needed = _step_bytes(self._target) + cache.num_bytes * int(context) / cache.capacity
                shares[f"{kind}, context {context}"] = round(needed / ms / 1e6 / gb_per_s, 4)
        return shares

    def _fill(self, assembly: Assembly, context: int) -> list[int]:
        """Read a text of ``context`` tokens into the target's cache."""
        text = (self._text * (context // len(self._text) + 1))[:context]
        for _ in assembly.engine.target.prefill(text):
            pass
        return text

    def _replay_ms(self, call: Callable[[], object], launch: Callable[[], object]) -> float:
        """Median of one launch; ``call`` first writes the inputs, and is made twice so that it is recorded."""
        call()
        call()
        return statistics.median(time_calls(launch, self._device.type, 3 if self._tiny else 20))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def time_calls(call: Callable[[], object], device: str, samples: int) -> list[float]:
    """Milliseconds of each call, by the device's clock where it has one; the first two calls are left out."""
    if device != "cuda":
        times = []
        for _ in range(samples + 2):
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
        return times[2:]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 3)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events[2:])]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Steps built inside run operator by operator (and are still captured)."""
    build = runner.build_step
    runner.build_step = lambda module, inputs, *_, **__: partial(_eager, module, inputs)
    try:
        yield
    finally:
        runner.build_step = build


@contextmanager
def portable_operators() -> Iterator[None]:
    """CUDA operators without Triton."""
    chosen = native.cuda_operators
    native.cuda_operators = lambda: {**PORTABLE, "keep_rows": keep_rows}
    try:
        yield
    finally:
        native.cuda_operators = chosen


def _bundled_calibration() -> tuple[Shapes, Learned | None]:
    """Shapes and acceptance tables of the bundled pair, from whichever machine; defaults where they cannot be read."""
    try:
        path = min((ROOT / "plans" / "tiny").glob("*.yaml"))
        plan = Plan.load(path)
        return plan.shapes, Learned.load(path.parent / plan.predictor)
    except (YggdrasilError, ValueError, ImportError) as error:
        print(f"no calibration of the bundled pair ({error}): the objective policy is left out", file=sys.stderr)
        return Shapes(), None


def _tiny_shape(narrow: ModelShape) -> ModelShape:
    return replace(narrow, intermediate_size=narrow.intermediate_size + 32)


def _num_parameters(loaded: LoadedModel) -> int:
    return sum(parameter.numel() for parameter in loaded.model.parameters())


def _step_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that one token must read: all but the rows of an embedding that is only looked up."""
    model = loaded.model
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total - (0 if embedding is head else embedding.nbytes)


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
