"""What weights of fewer bits change: the cost of a step, the text, and how often the drafter is right.

Both targets decode the same prompts in turns, each its own greedy text. They are different models: their texts part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch

from yggdrasil.calibration.pair import build_assembly
from yggdrasil.calibration.settings import PairSource
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.engine.apart import compile_missing
from yggdrasil.engine.decoder import Decoder, Generation
from yggdrasil.policy.decision import Policy
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.widths import fitting_or_widest

CHAIN_DEPTH = 4


class _Decoded(NamedTuple):
    plain: Generation
    guessed: Generation


_Results: TypeAlias = Mapping[Weights, Sequence[_Decoded]]


def weights_effect(
    pair: PairSource,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    phase: Callable[[str], Callable[[float], None]],
) -> pd.DataFrame:
    """One row a figure with columns ``figure``, ``full``, ``weights``: milliseconds a token, AAL, agreement of choices.

    ``prompts`` are tokens. Speculation is a chain of ``CHAIN_DEPTH`` here, the same for both; where no model drafts, a
    tree of as many guesses that cost no pass; where nothing guesses at all, there are no figures of it.
    """
    width = fitting_or_widest(pair.shapes.verify_widths, 1 + CHAIN_DEPTH)
    has_model, widths = pair.drafter is not None, tuple(sorted({1, width}))
    shapes = replace(
        pair.shapes, draft_widths=(1,) if has_model else (), max_depth=CHAIN_DEPTH, verify_widths=widths
    )  # fmt: skip
    policy: Policy = FixedPolicy(TreeShape(1, CHAIN_DEPTH, width)) if has_model else ModelFreePolicy(width)
    tokenizer = load_tokenizer(pair.target)
    kinds: tuple[Weights, Weights] = ("full", weights)
    decoders: dict[Weights, Decoder] = {}
    for kind in kinds:
        source = replace(pair, shapes=shapes, weights=kind)
        assembly = build_assembly(source)
        compile_missing(assembly, phase)
        decoders[kind] = Decoder(assembly, tokenizer, policy, frozenset())
    report = phase(f"decoding with full and with {weights} weights")
    results: dict[Weights, list[_Decoded]] = {kind: [] for kind in kinds}
    for i, prompt in enumerate(prompts):
        for kind, decoder in decoders.items():
            plain, guessed = (
                decoder.generate(prompt, max_new_tokens=max_new_tokens, speculation=speculation)
                for speculation in (False, True)
            )
            results[kind].append(_Decoded(plain, guessed))
        report((i + 1) / len(prompts))
    texts = [[*prompt, *result.plain.tokens] for prompt, result in zip(prompts, results["full"], strict=True)]
    agreed = []
    for prompt, text in zip(prompts, texts, strict=True):
        choices = _choices(decoders[weights].assembly.target, text)[len(prompt) - 1 : -1]
        agreed.append(float((choices == np.array(text[len(prompt) :])).mean()))
    same = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.plain.tokens, b.plain.tokens, strict=False)))
        for a, b in zip(*results.values(), strict=True)
    ]
    rows = [
        ("T(1): a plain step, ms", *_medians(results, lambda r: _step_ms(r.plain, "plain"))),
        ("plain ms a token", *_medians(results, lambda r: r.plain.metrics.tpot_ms)),
        *(_guessed(results, "chain" if has_model else "tree", width) if has_model or pair.free else ()),
        ("chosen tokens equal, given the full model's text", 1.0, float(np.mean(agreed))),
        (f"tokens before the texts part, of {max_new_tokens}", float(max_new_tokens), float(np.mean(same))),
    ]
    return pd.DataFrame(rows, columns=["figure", *kinds])


def _guessed(results: _Results, guesses: str, width: int) -> list[tuple[str, float, float]]:
    """The figures of speculation."""
    return [
        (f"T({width}): verification, ms", *_medians(results, lambda r: _step_ms(r.guessed, "verify"))),
        (f"{guesses} ms a token", *_medians(results, lambda r: r.guessed.metrics.tpot_ms)),
        (f"AAL of the {guesses}", *_medians(results, lambda r: r.guessed.metrics.aal)),
    ]


def _step_ms(generation: Generation, stage: str) -> float:
    """Mean of the iterations that ran the stage."""
    metrics = generation.metrics
    count = metrics.plain_steps if stage == "plain" else metrics.iterations - metrics.plain_steps
    return metrics.stage_ms.get(stage, 0.0) / max(count, 1)


def _medians(results: _Results, figure: Callable[[_Decoded], float]) -> tuple[float, float]:
    full, rounded = (float(np.median([figure(result) for result in decoded])) for decoded in results.values())
    return full, rounded


@torch.inference_mode()
def _choices(runner: ModelRunner, text: Sequence[int]) -> np.ndarray:
    """The model's choice after each token of ``text``."""
    runner.text.forget()  # its rows are overwritten
    rows = torch.arange(len(text))
    mask = rows[:, None] >= rows[None, :]
    tokens, offsets = torch.tensor(text), torch.zeros(2, dtype=torch.int64)
    choices: np.ndarray = (
        runner.call(runner.weights, runner.cache.tensors(), tokens, rows, mask, offsets).logits.argmax(-1).numpy()
    )
    return choices
