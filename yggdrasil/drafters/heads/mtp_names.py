"""How published models name the module for multi-token prediction (MTP) that lies among their own tensors."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class MtpNames:
    """Names of a family's files, without ``.weight``; ``{layers}`` stands for the number of the target's layers."""

    block: str  # what the tensors of its decoder layer begin with
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str  # of its outputs
    is_hidden_first: bool = False  # the projection reads the state before the embedding

    def of(self, layers: int) -> Self:
        """Those of a target with so many layers."""
        named = {name: value.format(layers=layers) for name, value in vars(self).items() if isinstance(value, str)}
        return type(self)(**named, is_hidden_first=self.is_hidden_first)

    @property
    def parts(self) -> dict[str, str]:
        """Our name of each tensor around the layer, by the family's."""
        ours = "embedding_norm", "hidden_norm", "projection", "norm"
        return {f"{getattr(self, part)}.weight": f"{part}.weight" for part in ours}


# By the model type of their configurations. ERNIE's module has no last norm of its own and goes through the target's,
# as in Baidu's FastDeploy; vLLM leaves it out.
MTP_NAMES = {
    "mimo": MtpNames(
        "model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm", is_hidden_first=True,
    ),
    "glm4_moe": MtpNames(
        "model.layers.{layers}.", "model.layers.{layers}.enorm", "model.layers.{layers}.hnorm",
        "model.layers.{layers}.eh_proj", "model.layers.{layers}.shared_head.norm",
    ),
    "ernie4_5_moe": MtpNames(
        "model.mtp_block.0.", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0",
        "model.norm",
    ),
}  # fmt: skip
