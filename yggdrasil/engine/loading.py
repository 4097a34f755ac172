"""Loads the parts of a ``Decoder`` from a plan (the YAML file of a calibration): models, drafters, steps and policy."""

from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from yggdrasil.artifacts.gguf import forget_headers, is_gguf
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.drafters.protocol import Drafter, group_of
from yggdrasil.drafters.registry import missing_names
from yggdrasil.engine.assembly import Assembly, assemble, default_backend, open_device, usable_backend
from yggdrasil.engine.end_tokens import end_tokens
from yggdrasil.engine.plan_parts import (
    Drafting,
    check_fingerprint,
    drafting_by,
    planned_drafter,
    planned_model_free,
    planned_policy,
)  # fmt: skip
from yggdrasil.errors import ArgumentTypeError, ArgumentValueError, YggdrasilError
from yggdrasil.policy.fixed import Policy
from yggdrasil.predictor.bundle import Learned
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.memory_limits import check_cache_memory
from yggdrasil.runtime.native_steps.loading import refuse_uncovered
from yggdrasil.runtime.shared import is_shared, shared_model
from yggdrasil.scheduling.plan import Plan, Shapes

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DtypeName = Literal["bfloat16", "float32"]


class DecoderParts(NamedTuple):
    """The arguments of the constructor of ``Decoder``. ``eos`` has the ids of the model's end tokens."""

    assembly: Assembly
    tokenizer: Tokenizer
    policy: Policy
    eos: frozenset[int]


def load_parts(
    plan: Plan,
    folder: Path,
    learned: Learned | None,
    dtype: DtypeName,
    stand_in: Drafter | None,
    backend: Backend | None,
    max_length: int | None,
    tokenizer: Tokenizer | None,
) -> DecoderParts:
    """Load the models and drafters of ``plan``, build its policy, and return the arguments of ``Decoder``.

    Args:
        folder: the plan's predictor, which has n-gram tables and other fitted files.
        learned: the depth predictor and acceptance from ``folder``; None uses default estimates.
        dtype: arithmetic of the models.
        stand_in: drafter object that replaces the plan's drafter; None keeps the plan's drafter.
        backend: how steps run; None takes the device's default.
        max_length: context length in tokens; None takes the plan's.
        tokenizer: the target's if already loaded, else None.

    Raises:
        YggdrasilError: the checkpoints are not those of the plan, or are incompatible.
    """
    check_fingerprint(plan.target, "target")
    source = Source.find(plan.target.path())
    if source.tokenizer_fingerprint() != plan.tokenizer:
        raise YggdrasilError(f"the tokenizer of {source.given} is not the one the plan {plan.name} was calibrated with")
    forget_headers()  # lowers peak memory: loading the tokenizer needs as much
    tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
    device = open_device(plan.device)
    if backend == "native":
        refuse_uncovered(source)
    backend = usable_backend(backend, device) or default_backend(device, compiles=not plan.is_provisional)
    shapes = plan.shapes if max_length is None else replace(plan.shapes, max_length=max_length)
    if device.type != "cpu":
        _check_card(plan, source, shapes, dtype, device)
    # Before the weights are resident: tables take more memory while they are read.
    model_free = planned_model_free(plan, folder) if stand_in is None else []
    target = shared_model(
        source, DTYPES[dtype], device, plan.target.threads, plan.weights_in(dtype),
        is_described=backend in ("native", "uncompiled"),
    )  # fmt: skip
    plan, second, model_free = (
        Drafting(plan, planned_drafter(plan, folder, tokenizer, target, dtype), model_free)
        if stand_in is None
        else drafting_by(plan, folder, stand_in)
    )
    policy = planned_policy(plan, learned, drafts=second is not None)
    shapes = plan.shapes if max_length is None else replace(plan.shapes, max_length=max_length)
    if shapes.max_length > plan.shapes.max_length:
        models = [target, *([second] if isinstance(second, LoadedModel) else [])]
        check_cache_memory(models, shapes.max_length, shapes.cache_capacity)
    knots = None if learned is None else torch.from_numpy(np.asarray(learned.acceptance.knots))
    assembly = assemble(
        target, second, shapes, backend, knots=knots, stages=plan.stages, model_free=group_of(model_free)
    )
    return DecoderParts(assembly, tokenizer, policy, end_tokens(str(source.folder), target.sizes.eos, tokenizer))


def _check_card(plan: Plan, source: Source, shapes: Shapes, dtype: DtypeName, device: torch.device) -> None:
    """Raise YggdrasilError if the models of ``plan``, their caches and CUDA graphs do not fit the GPU ``device``."""
    from yggdrasil.runtime.gpu_memory import ToLoad, check_card  # imported here: a CPU needs no such check

    models = [(source, plan.target)]
    if plan.drafter is not None and not is_head(plan.drafter.path()):
        models.append((Source.find(plan.drafter.path()), plan.drafter))
    to_load = []
    for found, ref in models:
        weights = plan.weights_in(dtype, ref)
        is_there = is_shared(found, DTYPES[dtype], device, ref.threads, weights)
        to_load.append(ToLoad(found, weights, is_there))
    check_card(to_load, DTYPES[dtype], device, shapes.max_length, shapes.cache_capacity, shapes.widest_pass)


def check_opening(plan: object, dtype: object, drafter: object, target: object) -> None:
    """Check the types and values of the arguments of ``Decoder.from_plan``, before any file is read.

    Raises:
        YggdrasilError: an argument is invalid. The error is also a ``TypeError`` or ``ValueError``.
    """
    if not isinstance(plan, str | Path):
        raise ArgumentTypeError(f"the plan is {plan!r}; it must be a name or a path")
    if is_gguf(Path(plan)):
        raise ArgumentValueError(f"{plan} is a model and no plan; open it with Decoder.from_pretrained")
    if target is not None and not isinstance(target, str | Path):
        raise ArgumentTypeError(f"target is {target!r}; it must be the place of a model")
    if dtype is not None and dtype not in get_args(DtypeName):
        raise ArgumentValueError(f"dtype must be one of {', '.join(get_args(DtypeName))}, not {dtype!r}")
    if drafter is not None and (lacking := missing_names(drafter)):
        raise ArgumentTypeError(
            f"drafter is {drafter!r}, which lacks {', '.join(lacking)}; give an object that drafts (docs/drafters.md), "
            "or leave it out for the plan's"
        )
