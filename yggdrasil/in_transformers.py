"""Yggdrasil inside transformers: ``model.generate(**inputs, custom_generate=yggdrasil.custom_generate("mine"))``."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer


def custom_generate(plan: str | Path | Decoder) -> Callable[..., Any]:
    """What decodes in the place of transformers' own loop, with the pair of ``plan`` (or a decoder that is open).

    The logits processors, stopping criteria and generation configuration that ``generate`` prepared hold; sampling
    draws coins of its own, from PyTorch's seed. transformers hands no streamer to such a function: give it as
    ``yggdrasil_streamer``. Nor a tokenizer: give stop strings as a ``StopStringCriteria``.

    Raises:
        YggdrasilError: the plan cannot be decoded with; later, another vocabulary, several texts, beams, embeddings.
    """
    decoder = plan if isinstance(plan, Decoder) else Decoder.from_plan(plan)

    def generate(
        model: Any,
        input_ids: Tensor,  # [1, prompt] int64
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: "GenerationConfig | None" = None,
        yggdrasil_streamer: "BaseStreamer | None" = None,
        **inputs: Any,
    ) -> Any:
        assert generation_config is not None, "generate prepares one"
        _check(decoder, model, input_ids, generation_config, inputs)
        tokens = _decode(
            decoder, input_ids, logits_processor or [], stopping_criteria, generation_config, yggdrasil_streamer
        )
        sequences = torch.cat([input_ids, torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]

    return generate


def _check(decoder: Decoder, model: Any, input_ids: Tensor, config: "GenerationConfig", inputs: dict[str, Any]) -> None:
    faults = []
    vocabulary = decoder.assembly.target.call.vocab_size
    given = model.config.get_text_config().vocab_size
    if given != vocabulary:
        faults.append(f"the model has {given} tokens and the plan's target {vocabulary}: give a plan of this model")
    if input_ids.shape[0] != 1:
        faults.append(f"{input_ids.shape[0]} texts are given; Yggdrasil decodes one at a time")
    if inputs.get("inputs_embeds") is not None:
        faults.append("inputs_embeds are given, and Yggdrasil reads tokens; give input_ids alone")
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        faults.append("the text is padded; give it without padding")
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
        faults.append("beams and several sequences are not decoded; ask for one")
    if any((config.output_scores, config.output_logits, config.output_attentions, config.output_hidden_states)):
        faults.append("scores, logits, attentions and hidden states are not returned; leave out output_…")
    if faults:
        raise YggdrasilError("; ".join(faults))


def _decode(
    decoder: Decoder,
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: "GenerationConfig",
    streamer: "BaseStreamer | None",
) -> list[int]:
    """New tokens, up to where a criterion ends the text, or the context does, which a warning tells."""
    seed = int(torch.randint(2**62, ())) if config.do_sample else None
    sampling = SamplingParams(temperature=float(bool(config.do_sample)), logits_processors=list(processors), seed=seed)
    prompt = input_ids[0].tolist()
    # How many tokens there are to be is one of the criteria, and so is the end of the text.
    longest = min(config.max_length, decoder.assembly.engine.max_length)
    request = decoder.start(prompt, max_new_tokens=longest, ignore_eos=True, sampling=sampling)
    text = torch.zeros(1, len(prompt) + longest + 1, dtype=torch.int64)
    text[0, : len(prompt)] = input_ids[0]
    done, has_ended = 0, False
    if streamer is not None:
        streamer.put(input_ids.cpu())
    for _ in request:
        for token in request.tokens[done:]:
            text[0, len(prompt) + done] = token
            done += 1
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            has_ended = bool(criteria) and bool(criteria(text[:, : len(prompt) + done], None).all())
            if has_ended:
                break
        if has_ended:
            break
    result = request.result()  # ends it, if a criterion did
    if result.finish_reason == "context" and not has_ended:
        warnings.warn(
            f"the text ends where the decoder's context of {decoder.assembly.engine.max_length} tokens does; give "
            "custom_generate a decoder with a larger max_length",
            stacklevel=3,
        )
    if streamer is not None:
        streamer.end()
    return text[0, len(prompt) : len(prompt) + done].tolist()
