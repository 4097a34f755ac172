"""Builds an ``Assembly``: engine, steps, caches and tree buffers, from loaded models and tree shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch

from yggdrasil.arguments import check_tokens
from yggdrasil.compiler.compiled import Backend
from yggdrasil.compiler.in_process import keep_code
from yggdrasil.drafters.draft_model import DraftModel, identity_knots
from yggdrasil.drafters.expansion import ExpansionDrafter
from yggdrasil.drafters.heads.block.config import BlockSettings
from yggdrasil.drafters.heads.block.drafter import BlockDrafter
from yggdrasil.drafters.heads.eagle.drafter import HeadDrafter
from yggdrasil.drafters.heads.loading import LoadedHead
from yggdrasil.drafters.heads.medusa.drafter import MedusaDrafter
from yggdrasil.drafters.heads.medusa.module import MedusaSettings
from yggdrasil.drafters.level_drafter import LevelDrafter
from yggdrasil.drafters.next_drafts import NextDrafts
from yggdrasil.drafters.protocol import Drafter, DrafterGroup
from yggdrasil.engine.engine import Engine
from yggdrasil.engine.targets.captured_target import CapturedTarget, check_capturable
from yggdrasil.engine.targets.logit_target import LogitTarget
from yggdrasil.engine.targets.target import TargetModel
from yggdrasil.errors import ArgumentValueError, YggdrasilError
from yggdrasil.runtime.graphs import Capture, Recorder
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.memory_limits import check_caches
from yggdrasil.runtime.passes import HEAD_INPUT
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.scheduling.plan import DeviceName, Shapes
from yggdrasil.scheduling.stages import DEFAULT_ORDER, Schedule
from yggdrasil.tree.token_tree import TokenTree

Phase = Callable[[str], Callable[[float], None]]  # (title) -> callback for the fraction done, 0 to 1
READ_WIDTH = 16  # the most prompt tokens per pass of ``ExpansionDrafter``


def open_device(name: DeviceName) -> torch.device:
    """Return the ``torch.device`` of the name "cpu" or "cuda".

    Raises:
        YggdrasilError: the name is "cuda", and CUDA is not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise YggdrasilError(
            "no CUDA device can be used here; leave out --device or give --device cpu, and calibrate again if the plan "
            "is for a GPU"
        )
    return torch.device(name)


def best_device() -> DeviceName:
    """Return "cuda" if CUDA is available, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_backend(device: torch.device, *, compiles: bool = True) -> Backend:
    """Return the backend (how a model's steps run) to use on ``device`` if the user names no backend.

    On a GPU it is "cudagraph". On a CPU it is "native" if ``compiles`` is True, else "uncompiled", with which no
    compiler is ever started.
    """
    if device.type == "cuda":
        return "cudagraph"
    return "native" if compiles else "uncompiled"


def usable_backend(wanted: Backend | None, device: torch.device) -> Backend | None:
    """Return the backend that the option ``wanted`` (None if it is not given) stands for on ``device``.

    On a GPU, "inductor" becomes "cudagraph". In all other cases ``wanted`` is returned unchanged, None included.

    Raises:
        YggdrasilError: ``wanted`` is "native" and the device is a GPU, or ``wanted`` is no backend.
    """
    if wanted not in (None, *get_args(Backend)):
        raise ArgumentValueError(f"backend must be one of {', '.join(get_args(Backend))}, not {wanted!r}")
    if device.type != "cuda":
        return wanted
    if wanted == "native":
        raise YggdrasilError("native steps run on a CPU; for a GPU use --backend inductor")
    return "cudagraph" if wanted == "inductor" else wanted


def silent(title: str) -> Callable[[float], None]:
    """Return a progress callback that does nothing; a ``Phase`` for callers without a display. ``title`` is ignored."""
    return lambda fraction: None


@dataclass(frozen=True)
class Assembly:
    """An engine with the model runners (steps and cache of a model) of its target and drafter.

    ``drafter`` is None without a draft model or draft head.
    """

    engine: Engine
    target: ModelRunner
    drafter: ModelRunner | None
    shapes: Shapes

    @property
    def second(self) -> LoadedModel | LoadedHead | Drafter | None:
        """The drafter in the form that ``assemble`` takes, to build another assembly; None if there is no drafter."""
        drafter = self.engine.drafter
        if isinstance(drafter, HeadDrafter | MedusaDrafter | BlockDrafter):
            return drafter.opened
        return drafter if self.drafter is None else self.drafter.loaded

    @cached_property
    def logit_target(self) -> LogitTarget:
        """Return the target for requests whose tokens are chosen and accepted on the host, from logits.

        It has the same KV cache as ``engine.target``, which accepts on the device. The first access builds its compiled
        passes. On a GPU this also records CUDA graphs, which overwrites the cache: the next request reuses no prefix.
        """
        assert isinstance(self.engine.target, TargetModel | CapturedTarget)
        with torch.inference_mode(False):  # inference-mode buffers could not be written outside it
            target = LogitTarget(self.engine.target, self.engine.tree, self.shapes.verify_widths)
        self.target.complete_again()
        if target.captured is not None:  # recording runs each capture once, between requests
            self.forget()
            for capture in target.captured.captures():
                capture.prepare()
            keep_code()
            self.forget()
        return target

    @property
    def has_draft_model(self) -> bool:
        """Return whether the drafter is a draft model, not a draft head or a model-free drafter."""
        return isinstance(self.engine.drafter, DraftModel)

    @cached_property
    def expansion_drafter(self) -> ExpansionDrafter:
        """Return the drafter for requests that set an expansion or whose rule needs randomly drawn candidates.

        The host runs the draft model level by level. The first access builds its steps.

        Raises:
            YggdrasilError: there is no draft model.
        """
        if self.drafter is None or not self.has_draft_model:
            raise YggdrasilError(
                "drawn candidates and k-ary trees need a draft model, and this decoder has none; name one with drafter "
                "(--drafter)"
            )
        tree = self.engine.tree
        widths = {*self.shapes.draft_widths, min(READ_WIDTH, tree.num_nodes)}
        with torch.inference_mode(False):
            drafter = ExpansionDrafter(self.drafter, tree, sorted(widths), self.target.call.vocab_size)
        self.drafter.complete_again()
        return drafter

    @property
    def runs_transformers_code(self) -> bool:
        """Whether the target or the drafter runs its transformers code, compiled by TorchInductor or eagerly."""
        runners = [runner for runner in (self.target, self.drafter) if runner is not None]
        return any(runner.backend in ("inductor", "eager") and runner.loaded.config for runner in runners)

    def complete(self, phase: Phase = silent) -> None:
        """Build every step of the target and the drafter: compile it, or on a GPU capture it as a CUDA graph.

        ``phase`` is called with a title and returns a callback for the fraction done, 0 to 1. The steps of
        ``logit_target`` and ``expansion_drafter`` are excluded: they are built on first access.
        """
        if isinstance(self.engine.target, CapturedTarget):
            self._capture(phase)
            return
        for name, runner in (("target", self.target), ("drafter", self.drafter)):
            if runner is not None:
                is_compiled = runner.backend == "inductor"
                runner.complete(phase(f"compiling steps of the {name}") if is_compiled else silent(""))

    def forget(self) -> None:
        """Invalidate the KV caches of target and drafter. The next request then prefills its whole prompt."""
        self.engine.forget()
        if self.drafter is not None:
            self.drafter.text.forget()

    def _capture(self, phase: Phase) -> None:
        """Compile and record all CUDA graphs of target and drafter, and store the compiled code for later processes."""
        self.forget()
        captures = list(self._captures())
        if not all(capture.is_prepared for capture in captures):
            report = phase("compiling and capturing steps of this GPU")
            for number, capture in enumerate(captures, start=1):
                capture.prepare()
                report(number / len(captures))
            keep_code()
        self.forget()

    def _captures(self) -> Iterator[Capture]:
        if isinstance(self.engine.target, CapturedTarget):
            yield from (*self.engine.target.captures.values(), *self.engine.target.host_tree.captures())
        if isinstance(self.engine.drafter, LevelDrafter):
            yield from self.engine.drafter.captures(range(1, self.shapes.max_depth + 1))
        if isinstance(self.engine.target, CapturedTarget) and self.engine.target.next_drafts is not None:
            yield from self.engine.target.next_drafts.captures(range(1, self.shapes.max_depth + 1))


def assemble(
    target: LoadedModel,
    drafter: LoadedModel | LoadedHead | Drafter | None,
    shapes: Shapes,
    backend: Backend,
    *,
    knots: torch.Tensor | None = None,
    stages: Sequence[str] = DEFAULT_ORDER,
    other_stages: Sequence[Sequence[str]] = (),
    model_free: DrafterGroup | None = None,
) -> Assembly:
    """Build an ``Assembly``: allocate KV caches and tree buffers for ``shapes``, and define every step of both models.

    No step is compiled here. Each is compiled by its first call, or all by ``Assembly.complete``.

    Args:
        drafter: draft model, draft head or a drafter object; None for only model-free drafters, or plain decoding.
        shapes: the context length, and the widths and depths of trees.
        backend: how steps run, such as "native" or "cudagraph".
        knots: acceptance calibration, [M] float32: log acceptance probabilities at M equally spaced log-probabilities
            of the drafter from -12 to 0. With None the drafter's probabilities are used as they are.
        stages: labels of the schedule, the order of an iteration's stages with their variants.
        other_stages: labels of the schedules that ``Engine.use_schedule`` may set later.
        model_free: n-gram and other drafters without a model, used with or without ``drafter``.

    Raises:
        YggdrasilError: the models or the backend do not support the shapes or schedules, or a GPU has too little memory
            for the KV caches.
    """
    vocab_size = target.vocab_size
    if shapes.candidates > vocab_size:
        raise YggdrasilError(f"{shapes.candidates} candidates a node, but the vocabulary has {vocab_size} tokens")
    if backend == "cudagraph":
        for labels in (stages, *other_stages):
            check_capturable(Schedule.parse(labels))
    _refuse_recurrent(drafter)
    if target.device.type == "cuda":  # on a CPU, memory is taken as texts grow
        second = drafter.loaded if isinstance(drafter, LoadedHead) else drafter
        with_caches = [target, *([second] if isinstance(second, LoadedModel) else [])]
        check_caches(with_caches, shapes.max_length, shapes.cache_capacity)
    tree = TokenTree.allocate(shapes.num_nodes, shapes.candidates, target.device)
    recorder = Recorder(target.device) if backend == "cudagraph" else None
    drafter_runner = None
    chosen: Drafter | None
    if isinstance(drafter, LoadedModel):
        # One model's vocabulary may be padded: draft only tokens that both have.
        known = min(vocab_size, drafter.vocab_size)
        drafter_runner = ModelRunner(drafter, shapes.cache_capacity, known, backend, recorder=recorder)
        chosen = DraftModel(
            drafter_runner, tree, shapes.draft_widths, shapes.max_depth + 1, shapes.prefill_widths,
            identity_knots() if knots is None else knots, **_draft_variants(shapes, [stages, *other_stages]),
        )  # fmt: skip
    elif isinstance(drafter, LoadedHead):
        opened = _head_drafter(drafter, shapes, backend, recorder, tree, identity_knots() if knots is None else knots)
        chosen, drafter_runner = opened, opened.runner
    else:
        chosen = drafter
    hidden_layers = () if chosen is None else _layers_read(chosen, target)
    target_runner = ModelRunner(
        target, shapes.cache_capacity, vocab_size, backend, hidden_layers, recorder, shapes.widest_pass, is_sparse=True
    )
    make_target = TargetModel if recorder is None else CapturedTarget
    model = make_target(target_runner, tree, shapes.verify_widths, shapes.prefill_widths)
    if isinstance(model, CapturedTarget) and isinstance(chosen, LevelDrafter):
        assert recorder is not None
        most, copies = max(shapes.verify_widths), model_free is not None
        model.next_drafts = NextDrafts(chosen, target, tree, recorder, most, copies=copies)
    limit = min(shapes.max_length, target.max_context)
    if isinstance(drafter, LoadedModel):
        limit = min(limit, drafter.max_context)
    engine = Engine(model, chosen, tree, shapes.verify_widths, limit, stages, model_free)
    return Assembly(engine, target_runner, drafter_runner, shapes)


def _refuse_recurrent(drafter: object) -> None:
    """Raise YggdrasilError if ``drafter`` is a model with recurrent layers."""
    if isinstance(drafter, LoadedModel) and drafter.sizes.recurrence is not None:
        raise YggdrasilError(
            f"{drafter.name} has recurrent layers, and a draft model must attend in all of its layers; take another, a "
            "head, or --drafter none"
        )


def _layers_read(drafter: Drafter, target: LoadedModel) -> tuple[int, ...]:
    """Return the target layers whose hidden states ``drafter`` reads.

    Raises:
        YggdrasilError: a user's drafter lists a layer that the target does not have.
    """
    layers = check_tokens(f"layers of the drafter {drafter.name}", drafter.capabilities.layers)
    wrong = next((layer for layer in layers if not HEAD_INPUT <= layer < target.num_layers), None)
    if wrong is not None:
        raise YggdrasilError(
            f"layers of the drafter {drafter.name} holds {wrong}; the target's layers are 0 to "
            f"{target.num_layers - 1}, and {HEAD_INPUT} is what its head reads"
        )
    return tuple(layers)


def _head_drafter(
    head: LoadedHead, shapes: Shapes, backend: Backend, recorder: Recorder | None, tree: TokenTree, knots: torch.Tensor
) -> HeadDrafter | MedusaDrafter | BlockDrafter:
    known = head.settings.draft_vocab_size
    if shapes.candidates > known:
        raise YggdrasilError(f"{shapes.candidates} candidates a node, but {head.loaded.name} drafts {known} tokens")
    capacity = shapes.cache_capacity
    if isinstance(head.settings, MedusaSettings):
        capacity = 1
    elif isinstance(head.settings, BlockSettings):
        capacity = max(capacity, shapes.max_length + head.settings.block_size)
    runner = ModelRunner(head.loaded, capacity, head.settings.vocab_size, backend, recorder=recorder)
    if isinstance(head.settings, MedusaSettings):
        return MedusaDrafter(runner, head, tree, shapes.draft_widths, knots)
    kind = BlockDrafter if isinstance(head.settings, BlockSettings) else HeadDrafter
    return kind(runner, head, tree, shapes.draft_widths, shapes.max_depth + 1, shapes.prefill_widths, knots)


def _draft_variants(shapes: Shapes, schedules: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the arguments of ``DraftModel`` that all of ``schedules`` need together."""
    variants = [Schedule.parse(stages).variants for stages in schedules]
    guesses = any(chosen["head_draft"] == "ahead" for chosen in variants)
    keeps_rows = guesses or any(chosen["tail_draft"] != "superset" for chosen in variants)
    return {
        "keeps_rows": keeps_rows,
        "guess_widths": [width for width in shapes.verify_widths if width > 1] if guesses else [],
    }
