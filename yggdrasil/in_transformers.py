"""Use Yggdrasil in transformers: ``model.generate(**inputs, custom_generate=yggdrasil.custom_generate("mine"))``."""

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
    """Return a function for the ``custom_generate`` argument of transformers' ``generate``.

    It decodes with the models of ``plan`` (or with an open decoder) and applies the logits processors, stopping
    criteria and generation configuration that ``generate`` prepares. Sampling uses its own random numbers, seeded from
    PyTorch's generator. transformers passes neither streamer nor tokenizer to such a function: give a streamer as
    ``yggdrasil_streamer``, and stop strings as a ``StopStringCriteria``.

    Raises:
        YggdrasilError: the plan cannot be opened. The returned function raises YggdrasilError if the size of the
            model's vocabulary is not the plan's, and for batches, padding, beams, embeddings as input, and requested
            scores or hidden states.
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
    """Raise YggdrasilError with every reason why ``decoder`` cannot serve this call of ``generate``."""
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
    """Generate until a stopping criterion holds or the context is full (with a warning); return the new token ids."""
    seed = int(torch.randint(2**62, ())) if config.do_sample else None
    sampling = SamplingParams(temperature=float(bool(config.do_sample)), logits_processors=list(processors), seed=seed)
    prompt = input_ids[0].tolist()
    # The maximum length and the end-of-text token are among the stopping criteria.
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
    result = request.result()  # closes the request if a criterion ended it early
    if result.finish_reason == "context" and not has_ended:
        warnings.warn(
            f"the text ends where the decoder's context of {decoder.assembly.engine.max_length} tokens does; give "
            "custom_generate a decoder with a larger max_length",
            stacklevel=3,
        )
    if streamer is not None:
        streamer.end()
    return text[0, len(prompt) : len(prompt) + done].tolist()
