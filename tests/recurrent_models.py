"""Small random models with recurrent layers, in float32, whose choices differ from place to place."""

import copy
from functools import cache
from typing import NamedTuple

import torch
import transformers
from tiny import sharpened
from tiny_pair import VOCAB_SIZE, OracleDrafter, byte_tokenizer, generated
from transformers import AutoModelForCausalLM, PreTrainedModel

from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.scheduling.plan import Shapes

SHAPES = Shapes(
    max_length=200, draft_widths=(1, 2, 4), max_depth=4, candidates=4, verify_widths=(1, 4, 8, 16),
    prefill_widths=(4, 16),
)  # fmt: skip
_SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **_LINEAR, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 40, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 8,
    "head_dim": 16,
}
RECURRENT = {
    "lfm2": ("Lfm2Config", {**_CONVOLUTION, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2MoeConfig", {**_CONVOLUTION, **_EXPERTS, "num_dense_layers": 1}),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_EXPERTS}),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS}),
    "olmo_hybrid": ("OlmoHybridConfig", _DELTA),
    "granite": (
        "GraniteMoeHybridConfig",
        {**_MAMBA, **_LINEAR, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96,
         "embedding_multiplier": 5.0},
    ),
    "granite_dense": (
        "GraniteMoeHybridConfig",
        {**_MAMBA, **_LINEAR, "num_local_experts": 0, "shared_intermediate_size": 96, "embedding_multiplier": 5.0,
         "residual_multiplier": 0.6, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "nemotron_dense": (
        "NemotronHConfig",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", {**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16}),
    "falcon_scaled": (
        "FalconH1Config",
        {**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
         "key_multiplier": 0.75, "attention_in_multiplier": 1.25, "attention_out_multiplier": 0.8,
         "ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
         "mlp_multipliers": [0.9, 0.7], "mamba_rms_norm": True},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 2.5},
    ),
    "nemotron_latent": (
        "NemotronHConfig",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "full_attention", "moe"], "n_routed_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
         "moe_latent_size": 32},
    ),
}  # fmt: skip
# So that texts do not repeat a few tokens, whatever is read: seeds, and models whose LM head is the embedding.
SEEDS = {"granite_dense": 2, "nemotron_dense": 1, "bamba": 1, "falcon_h1": 4, "falcon_scaled": 3}
QUIET = ("lfm2", "lfm2_moe")


def recurrent_config(family):
    name, changes = RECURRENT[family]
    shape = {**_SHAPE, **changes}
    if "layers_block_type" in changes:
        del shape["num_hidden_layers"]
    return getattr(transformers, name)(**shape)


class RecurrentModel(NamedTuple):
    """A model ready for the engine, and an untouched copy of it."""

    loaded: LoadedModel
    plain: PreTrainedModel

    def runner(self, dtype=torch.float32):
        loaded = (
            self.loaded if dtype == torch.float32 else prepare_model(copy.deepcopy(self.plain).to(dtype), "half", 1)
        )
        return ModelRunner(loaded, 128, VOCAB_SIZE, "uncompiled", widest=32)

    def decoder(self, policy, drafter=None, backend="uncompiled", **options):
        assembly = assemble(self.loaded, drafter, SHAPES, backend, **options)
        return Decoder(assembly, byte_tokenizer(), policy, frozenset())

    def reference(self, prompt, count):
        """``count`` tokens of transformers' own greedy decoding."""
        return generated(self.plain, tuple(prompt), count)

    def oracle(self, prompt, count):
        """A drafter that knows most of what follows ``prompt``."""
        return OracleDrafter([*prompt, *self.reference(prompt, count)])


@cache
def recurrent_model(family):
    torch.manual_seed(SEEDS.get(family, 0))
    model = AutoModelForCausalLM.from_config(recurrent_config(family), dtype=torch.float32).eval()
    sharpened(model, 3, noise=0.25)
    if family in QUIET:
        model.get_input_embeddings().weight.data.mul_(0.1)
    return RecurrentModel(prepare_model(copy.deepcopy(model), family, 1), model)
