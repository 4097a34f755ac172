"""Whether a model, as transformers implements it, computes the same under tree attention. Asked before trusting it.

Families differ in what they hand to an attention function. A few tokens through both ways cost a moment and catch a
term that ours drops.
"""

import torch

from yggdrasil.checkpoints.families import cache_name
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.attention import ATTENTION_NAME
from yggdrasil.runtime.cache import StaticCache, StepCache
from yggdrasil.runtime.loaded import LoadedModel

_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08}  # of the logits' range
_ROUNDED = 0.08  # with quantised layers, where the last bit of an input may be a 127th of the largest


@torch.inference_mode()
def check_tree_attention(loaded: LoadedModel) -> None:
    """Compare a short text's logits with the model's own attention.

    Raises:
        YggdrasilError: they differ, or the model cannot be called with a step's cache.
    """
    device = loaded.device
    tokens = torch.arange(1, _TOKENS + 1, device=device) * 7 % min(loaded.vocab_size, 1000)
    positions = torch.arange(_TOKENS, device=device)
    cache = StaticCache.allocate(loaded.outline.key_heads, _TOKENS, loaded.dtype, device)
    step = StepCache(cache.keys, cache.values, torch.zeros(2, dtype=torch.int64, device=device))
    mask = positions[:, None] >= positions[None, :]
    model = loaded.model
    try:
        model.set_attn_implementation("eager")
        own = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        model.set_attn_implementation(ATTENTION_NAME)
        ours = model(
            input_ids=tokens[None], position_ids=positions[None], attention_mask=mask[None, None],
            use_cache=True, step_cache=step, num_threads=loaded.num_threads, **{cache_name(model): step},
        ).logits[0].float()  # fmt: skip
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
        name = f"{loaded.name}: {type(model).__name__}"
        raise YggdrasilError(f"{name} does not run under tree attention ({error})") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    if not torch.isfinite(own).all():
        raise YggdrasilError(
            f"{loaded.name}: the logits are not finite (NaN or infinity); the weights are damaged or overflow in "
            f"{loaded.dtype}"
        )
    reason = f"{step.layers_attended} of its {loaded.num_layers} layers call it"
    if step.layers_attended == loaded.num_layers:
        scale = float((own.amax() - own.amin()).clamp(min=1e-6))
        difference = float((own - ours).abs().amax()) / scale
        if difference <= (_ROUNDED if loaded.formats else _TOLERANCE[loaded.dtype]):
            return
        reason = f"logits differ by {difference:.1%} of their range"
    raise YggdrasilError(
        f"{loaded.name}: {type(model).__name__} computes something that tree attention does not ({reason}); it cannot "
        "be served"
    )
