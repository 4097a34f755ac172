#!/usr/bin/env python3
"""Whether a trained EAGLE-3 head drafts the same tokens elsewhere: read by a plain forward of the format, and by us.

    scripts/check_head.py --target MODEL --head FOLDER [--texts 4] [--tokens 48]

The plain side is the published algorithm on transformers' layers: it opens config.json and model.safetensors itself and
uses nothing of this package. The target writes a text greedily; behind every position both sides draft a chain of four
tokens, in float32. Exit code 1 where they differ.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

DEPTH = 4


class PlainHead:
    """EAGLE-3's forward, one row at a time."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        config = json.loads((folder / "config.json").read_text())
        layers = config.get("eagle_aux_hidden_state_layer_ids")
        count = target.config.get_text_config().num_hidden_layers
        self.layers = layers or [2, count // 2, count - 3]  # of whose inputs features are made
        self.tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embedding = target.get_input_embeddings().weight.detach().float()  # type: ignore[union-attr]
        self.config = LlamaConfig(**{name: value for name, value in config.items() if name != "architectures"})
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.mlp = LlamaMLP(self.config).float()
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(self.mlp, name).weight.data = self.tensors[f"midlayer.mlp.{name}.weight"]
        table = self.tensors.get("d2t")
        self.token_of = None if table is None else torch.arange(len(table)) + table.long()

    def feature(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Of the target's hidden states [T, H], one feature a row."""
        return torch.cat([hidden_states[layer] for layer in self.layers], dim=-1) @ self.tensors["fc.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The norm called ``name`` of ``x``."""
        module = LlamaRMSNorm(x.shape[-1], self.config.rms_norm_eps)
        module.weight.data = self.tensors[f"{name}.weight"]
        output: Tensor = module(x)
        return output

    def run(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Outputs [T, H] of rows with ``tokens`` and the features before them, each attending to all up to it."""
        config, size = self.config, self.config.head_dim
        normed = self.norm("midlayer.hidden_norm", features)
        both = torch.cat([self.norm("midlayer.input_layernorm", self.embedding[tokens]), normed], dim=-1)
        q, k, v = (
            (both @ self.tensors[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)
            for name in ("q", "k", "v")
        )
        cos, sin = self.rotary(v, torch.arange(len(tokens))[None])
        q, k = (each * cos[0] + rotate_half(each) * sin[0] for each in (q, k))
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (each.repeat_interleave(groups, dim=0) for each in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        h = features + mixed @ self.tensors["midlayer.self_attn.o_proj.weight"].T
        output: Tensor = h + self.mlp(self.norm("midlayer.post_attention_layernorm", h))
        return output

    def chain(self, text: list[int], features: Tensor) -> list[int]:
        """``DEPTH`` tokens drafted behind ``text``, each the likeliest; ``features`` are those of the text [T, H]."""
        tokens, features = list(text[1:]), features[: len(text) - 1]
        for _ in range(DEPTH):
            outputs = self.run(torch.tensor(tokens), features)
            drafted = int((self.norm("norm", outputs[-1:]) @ self.tensors["lm_head.weight"].T).argmax())
            tokens.append(drafted if self.token_of is None else int(self.token_of[drafted]))
            features = torch.cat([features, outputs[-1:]])
        return tokens[-DEPTH:]


@torch.inference_mode()
def plain_drafts(folder: Path, head: Path, texts: int, tokens: int) -> list[tuple[list[int], list[list[int]]]]:
    """Texts of the target in ``folder``, and the chains that ``head`` drafts behind every token but the first four."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = PlainHead(head, model)
    torch.manual_seed(0)
    found = []
    for _ in range(texts):
        opening = torch.randint(0, len(plain.embedding), (1, 4))
        text = model.generate(
            opening, attention_mask=torch.ones_like(opening), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, pad_token_id=0,
        )[0].tolist()  # fmt: skip
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        features = plain.feature([state[0] for state in states])
        found.append((text, [plain.chain(text[:end], features) for end in range(4, len(text) + 1)]))
    return found


@torch.inference_mode()
def our_drafts(folder: Path, head: Path, texts: Sequence[list[int]]) -> list[list[list[int]]]:
    """The same chains by this package's drafter, on its own pass of the target."""
    from yggdrasil.calibration.record import hidden_states_of
    from yggdrasil.checkpoints.source import Source
    from yggdrasil.drafters.heads.convention import with_detected_layers
    from yggdrasil.drafters.heads.loading import load_head
    from yggdrasil.drafters.protocol import Budget
    from yggdrasil.engine.assembly import assemble
    from yggdrasil.runtime.loading import load_model
    from yggdrasil.scheduling.plan import Shapes

    target = load_model(folder, torch.float32, torch.device("cpu"), 1)
    opened = with_detected_layers(load_head(head, target, 1), target, Source.find(folder).fingerprint())
    shapes = Shapes(
        max_length=max(map(len, texts)) + 16, draft_widths=(1,), max_depth=DEPTH, candidates=1, verify_widths=(1,),
        prefill_widths=(16,),
    )  # fmt: skip
    assembly = assemble(target, opened, shapes, "eager")
    drafter: Any = assembly.engine.drafter
    tree, found = assembly.engine.tree, []
    for text in texts:
        _, layers = hidden_states_of(assembly.target, text)
        drafter.begin(text[:1])
        chains, known = [], 1
        for end in range(4, len(text) + 1):
            drafter.extend(text[known:end], {layer: state[known - 1 : end - 1] for layer, state in layers.items()})
            known = end
            drafter.head()
            drafter.propose(tree, Budget(DEPTH, 1))
            chains.append(tree.tokens[1 : 1 + DEPTH].tolist())  # one candidate a node makes a chain
        found.append(chains)
    return found


def check(
    target: Annotated[str, typer.Option(help="Folder, .gguf file or hub id of the target.")],
    head: Annotated[str, typer.Option(help="A head that `yggdrasil train` wrote: its folder, or yggdrasil:NAME.")],
    texts: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=1)] = 48,
) -> None:
    """Draft with both and compare."""
    from yggdrasil.checkpoints.source import Source
    from yggdrasil.drafters.heads.kinds import kind_of
    from yggdrasil.drafters.shipped_assets import resolve_shipped_head
    from yggdrasil.errors import YggdrasilError

    files = Path(resolve_shipped_head(head))
    if kind_of(files) != "eagle3":
        raise YggdrasilError(f"--head {head} is no folder of an EAGLE-3 head; name one that `yggdrasil train` wrote")
    folder = Source.find(target).checkpoint(torch.float32)
    plain = plain_drafts(folder, files, texts, tokens)
    ours = our_drafts(folder, files, [text for text, _ in plain])
    pairs = [pair for (_, theirs), chains in zip(plain, ours, strict=True) for pair in zip(theirs, chains, strict=True)]
    same = sum(theirs == chain for theirs, chain in pairs)
    different = len({tuple(chain) for _, chain in pairs})
    print(f"{same} of {len(pairs)} chains agree, {different} different ones")
    raise typer.Exit(same != len(pairs))


if __name__ == "__main__":
    from yggdrasil.cli import run_script

    run_script(check, "check_head")
