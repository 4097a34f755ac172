"""transformers' decoding methods as systems to compare with."""

import copy
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from bench_systems import Continuation, System
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from yggdrasil.checkpoints.families import cache_name

LOOKUP_TOKENS = 10  # drafted by prompt lookup decoding; transformers has no default


class TransformersSystem:
    """``model.generate`` with some options; the assistant's generation config persists between requests."""

    family = "transformers"

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        num_threads: int,
        *,
        options: Mapping[str, Any] | None = None,
        assistant: PreTrainedModel | None = None,
        assistant_settings: Mapping[str, Any] | None = None,
        static_length: int | None = None,
    ) -> None:
        """``static_length``: use a static cache of that many positions and a compiled forward pass."""
        self.name = name
        self.is_plain = not options and assistant is None and static_length is None
        self._model, self._assistant = model, assistant
        self._num_threads = num_threads
        self._options = dict(options or {})
        self._cache: StaticCache | None = None
        if assistant is not None:
            self._options["assistant_model"] = assistant
            self._assistant_config = copy.deepcopy(assistant.generation_config)
            self._assistant_config.update(**dict(assistant_settings or {}))
        if static_length is not None:
            self._cache = StaticCache(config=model.config, max_cache_len=static_length)
            compilation: Any = CompileConfig(mode="default")
            compilation._compile_all_devices = True  # by default generate() compiles on accelerators only
            self._options |= {cache_name(model): self._cache, "compile_config": compilation}

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Continuation:
        if self._cache is not None:
            self._cache.reset()
        if self._assistant is not None:
            self._assistant.generation_config = self._assistant_config
        tokens = torch.tensor([list(prompt)])
        clock = _Clock()
        generate: Any = self._model.generate  # transformers types it as a module
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            output = generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens, do_sample=False,
                streamer=clock, **self._options,
            )  # fmt: skip
        finally:
            torch.set_num_threads(num_threads)
        return clock.continuation(output[0, len(prompt) :].tolist())


class _Clock(BaseStreamer):
    """A streamer that records when tokens arrive: first the prompt, then each target pass's tokens."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._arrivals: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self._arrivals.append((perf_counter() - self._start, value.numel()))

    def end(self) -> None:
        return

    def continuation(self, tokens: list[int]) -> Continuation:
        _, first, *rest = self._arrivals
        decoded = sum(count for _, count in rest)
        last = rest[-1][0] if rest else first[0]
        tpot_ms = 1e3 * (last - first[0]) / decoded if decoded else 0.0
        return Continuation(tokens, 1e3 * first[0], tpot_ms, decoded, len(rest))


def transformers_systems(
    target: str,
    drafter: str | None,
    dtype: torch.dtype,
    num_threads: int,
    max_length: int,
    draft_lengths: Sequence[int],
) -> list[System]:
    """Return transformers' methods: plain (dynamic cache; compiled with static cache), assisted, prompt lookup.

    Assisted decoding by ``drafter`` (if given) has three schedules: a constant number of drafted tokens (one system for
    each of ``draft_lengths``), a number that adapts to acceptance, and drafting until the drafter's confidence is low,
    transformers' default.
    """
    model = _load(target, dtype)
    assistant = None if drafter is None else _load(drafter, dtype)

    def assisted(name: str, **settings: Any) -> System:
        name = f"transformers, assisted, {name}"
        return TransformersSystem(name, model, num_threads, assistant=assistant, assistant_settings=settings)

    def sized(schedule: str, length: int) -> dict[str, Any]:
        return {
            "num_assistant_tokens_schedule": schedule,
            "num_assistant_tokens": length,
            "assistant_confidence_threshold": 0.0,
        }

    schedules = []
    if assistant is not None:
        schedules = [
            *(assisted(f"constant {length}", **sized("constant", length)) for length in draft_lengths),
            assisted("dynamic, by success", **sized("heuristic", draft_lengths[0])),
            assisted("dynamic, by confidence"),
        ]
    return [
        TransformersSystem("transformers, dynamic cache", model, num_threads),
        TransformersSystem("transformers, static cache, compiled", model, num_threads, static_length=max_length),
        *schedules,
        TransformersSystem(
            "transformers, prompt lookup", model, num_threads, options={"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        ),
    ]


def _load(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with end-of-text tokens disabled."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    settings = GenerationConfig.from_model_config(model.config)
    settings.eos_token_id, settings.pad_token_id = None, 0
    model.generation_config = settings
    return model
