"""What a pair learns: the target the text or a teacher's distribution, the drafter the target's.

Dims: B sequences, S tokens of a sequence, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

NEXT_TOKEN_SHARE = 0.3  # of the loss on the text itself, beside the divergence from a teacher


def losses_of(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, teacher: LlamaForCausalLM | None
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from tokens [B, S] to the losses of target and drafter."""

    def forward(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            target_logits = target(tokens, use_cache=False).logits
            drafter_logits = drafter(tokens, use_cache=False).logits
        target_loss = next_token_loss(target_logits, tokens)
        if teacher is not None:
            with torch.autocast(tokens.device.type, torch.bfloat16), torch.no_grad():
                teacher_logits = teacher(tokens, use_cache=False).logits
            target_loss = NEXT_TOKEN_SHARE * target_loss + divergence(target_logits, teacher_logits)
        return target_loss, distillation_loss(drafter_logits, target_logits.detach())

    return forward


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next token. logits [B, S, V], tokens [B, S]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def distillation_loss(drafter_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL to the target's distribution plus half the cross-entropy of its first choice. Both logits [B, S, V]."""
    choice = target_logits.flatten(0, 1).argmax(dim=-1)
    first = F.cross_entropy(drafter_logits.flatten(0, 1).float(), choice)
    return divergence(drafter_logits, target_logits) + 0.5 * first


def divergence(logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL divergence from the distribution of ``target_logits``, a mean over tokens. Both [B, S, V]."""
    log_q = F.log_softmax(logits.flatten(0, 1).float(), dim=-1)
    log_p = F.log_softmax(target_logits.flatten(0, 1).float(), dim=-1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
