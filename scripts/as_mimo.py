"""Write a Llama checkpoint as a MiMo: the same function, in a family whose targets bring a module for MTP.

    python scripts/as_mimo.py --target SmolLM2-135M-Instruct --out mimo

MiMo's layers are Qwen2's, which add biases to queries, keys and values; here they are zeros. On such a target
`yggdrasil train --kind mtp` can be tried where no MiMo fits the machine.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen2ForCausalLM

from yggdrasil.artifacts import atomic_directory
from yggdrasil.checkpoints.facts import load_config, load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import run_script
from yggdrasil.errors import YggdrasilError

_ENDS = "generation_config.json"  # which tokens end an answer
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def main(
    target: Annotated[str, typer.Option(help="Folder, .gguf file or hub id of a Llama without biases.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
) -> None:
    """Write a Llama checkpoint as a MiMo."""
    source = Source.find(target)
    llama = load_config(source)
    if not isinstance(llama, LlamaConfig) or llama.attention_bias or llama.mlp_bias:
        raise YggdrasilError(f"--target {target} is no Llama without biases; name one that is")
    if out.exists() and any(out.iterdir()):
        raise YggdrasilError(f"--out {out} is not empty; name another folder")
    config = Qwen2Config(**{name: getattr(llama, name) for name in _SHARED})
    model = Qwen2ForCausalLM(config).bfloat16()
    weights = AutoModelForCausalLM.from_pretrained(source.checkpoint(torch.bfloat16), dtype=torch.bfloat16).state_dict()
    missing = model.load_state_dict(weights, strict=False).missing_keys
    for name in missing:
        assert name.endswith("proj.bias"), name
        model.get_parameter(name).data.zero_()
    with atomic_directory(out) as folder:
        model.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        written |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        load_tokenizer(source).save_pretrained(folder)
        if (source.folder / _ENDS).is_file():
            shutil.copy(source.folder / _ENDS, folder)
    typer.echo(f"Wrote {out}.")


if __name__ == "__main__":
    run_script(main, "as_mimo")
