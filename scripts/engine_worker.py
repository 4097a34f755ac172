"""Continue token ids with an engine of another project; ``python_engines.py`` runs this in the engine's environment.

    python engine_worker.py ENGINE MODEL.gguf THREADS CONTEXT

Each line of the input is a JSON object with ``prompt`` (token ids) and ``count``. Each line of the output has
``tokens``, ``first_ms`` (prompt to first token) and ``rest_ms`` (all later tokens). The first line is written once the
model is loaded: ``{"version": ...}``, or ``{"error": ...}`` if it cannot be. Uses the standard library and the engine
alone.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from time import perf_counter
from typing import Any

Continue = Callable[[Sequence[int], int], tuple[list[int], float, float]]


def openvino(model: str, threads: int, *, looks_up: bool) -> Continue:
    """OpenVINO GenAI; ``looks_up``: drafts by prompt look-up, with the lengths of its sample."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    options: dict[str, Any] = {"prompt_lookup": True} if looks_up else {}
    pipeline = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **options)

    def run(prompt: Sequence[int], count: int) -> tuple[list[int], float, float]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = count, False, True
        if looks_up:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        ids = np.array([prompt], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        started = perf_counter()
        result = pipeline.generate(inputs, config)
        whole, first = (perf_counter() - started) * 1e3, result.perf_metrics.get_ttft().mean
        return list(result.tokens[0]), first, whole - first

    return run


def ik_llama(model: str, threads: int, context_length: int) -> Continue:
    """ik_llama.cpp by its Python package, whose own ``generate`` ends at the end of the text; this loop does not."""
    from ik_llama_cpp import IkLlama
    from ik_llama_cpp._ctypes_api import llama_batch_free
    from ik_llama_cpp._internals import make_batch_range, make_batch_single

    llama = IkLlama(model, n_ctx=context_length, n_threads=threads, verbose=False)

    def decode(batch: Any) -> None:
        failed = llama._context.decode(batch)  # private, but the package is installed in one version
        llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def run(prompt: Sequence[int], count: int) -> tuple[list[int], float, float]:
        context, started = llama._context, perf_counter()
        context.kv_cache_clear()
        for first in range(0, len(prompt), context._n_ubatch):
            chunk = list(prompt[first : first + context._n_ubatch])
            decode(make_batch_range(chunk, pos_start=first, logits_last=first + len(chunk) == len(prompt)))
        tokens = [context.sample(-1, temperature=0.0, top_k=1, top_p=1.0)]
        read = perf_counter()
        while len(tokens) < count:
            decode(make_batch_single(tokens[-1], len(prompt) + len(tokens) - 1))
            tokens.append(context.sample(-1, temperature=0.0, top_k=1, top_p=1.0))
        return tokens, (read - started) * 1e3, (perf_counter() - read) * 1e3

    return run


def open_engine(engine: str, model: str, threads: int, context_length: int) -> tuple[Continue, str]:
    """Return what continues a prompt, and the package with its version."""
    if engine == "ik-llama":
        return ik_llama(model, threads, context_length), f"ik-llama-cpp-python {version('ik-llama-cpp-python')}"
    looks_up = engine == "openvino-lookup"
    return openvino(model, threads, looks_up=looks_up), f"openvino-genai {version('openvino-genai')}"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print to standard output
    engine, model, threads, context_length = sys.argv[1:]
    try:
        run, name = open_engine(engine, model, int(threads), int(context_length))
    except Exception as error:  # noqa: BLE001 - whatever another project raises is its answer
        answers.write(json.dumps({"error": " ".join(str(error).split())[:300]}) + "\n")
        return
    answers.write(json.dumps({"version": name}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        tokens, first_ms, rest_ms = run(request["prompt"], request["count"])
        answers.write(json.dumps({"tokens": tokens, "first_ms": first_ms, "rest_ms": rest_ms}) + "\n")


if __name__ == "__main__":
    main()
