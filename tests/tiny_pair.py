"""A tiny random pair with a tokenizer of its own, and the slow twins that decoding is held against.

The reference is always an unmodified copy in transformers, taken before our loader touches the model.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from tiny import sharpened
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from yggdrasil.drafters import Budget, Capabilities, Step
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.policy.fixed import Policy
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.passes import HostBuffer
from yggdrasil.scheduling.plan import Shapes

VOCAB_SIZE = 96
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
TEXT = tuple(torch.randint(1, VOCAB_SIZE, (80,), generator=torch.Generator().manual_seed(3)).tolist())
SHAPES = Shapes(
    max_length=200, draft_widths=(1, 2, 4), max_depth=4, candidates=4, verify_widths=(1, 2, 4, 8, 16),
    prefill_widths=(4, 16),
)  # fmt: skip


class TinyPair(NamedTuple):
    """Two models ready for the engine, and untouched copies of them."""

    target: LoadedModel
    drafter: LoadedModel
    plain_target: PreTrainedModel
    plain_drafter: PreTrainedModel

    def reference(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` tokens of transformers' own greedy decoding."""
        return generated(self.plain_target, tuple(prompt), count)

    def decoder(self, policy: Policy, shapes: Shapes = SHAPES, eos: Sequence[int] = (), **options: object) -> Decoder:
        """A decoder of this pair, or with another ``drafter``, on the ``backend`` "native" unless told otherwise."""
        settings = {"drafter": self.drafter, "backend": "native", **options}
        if (free := settings.get("model_free")) is not None and not isinstance(free, DrafterGroup):
            settings["model_free"] = DrafterGroup([free])
        return Decoder(assemble(self.target, shapes=shapes, **settings), byte_tokenizer(), policy, frozenset(eos))


def random_model(seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random Llama whose choices differ from place to place and whose guesses are sure."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, **changes}), dtype=torch.float32).eval()
    # An unsure drafter prefers a sibling to a grandchild, and trees stay shallow.
    sharpened(model, 3).lm_head.weight.data.mul_(150)
    return model


def noisy_copy(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """The same model, wrong now and then: its guesses are accepted often and not always."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return copied


def make_pair(noise: float = 0.006, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> TinyPair:
    """A new pair; with ``noise`` 0 the drafter is always right."""
    target = random_model(seed, **changes).to(dtype)
    drafter = noisy_copy(target, noise)
    untouched = copy.deepcopy(target), copy.deepcopy(drafter)
    return TinyPair(prepare_model(target, "tiny target", 1), prepare_model(drafter, "tiny drafter", 1), *untouched)


@cache
def generated(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """``count`` tokens of transformers' greedy decoding; computed once."""
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, len(prompt) :].tolist()


@torch.no_grad()
def cache_rows(model: PreTrainedModel, text: Sequence[int]) -> list[torch.Tensor]:
    """Keys of every layer, then values, [Hkv, len(text), D], as transformers caches them in one fresh pass."""
    layers = model(torch.tensor([list(text)]), use_cache=True).past_key_values.layers
    return [layer.keys[0] for layer in layers] + [layer.values[0] for layer in layers]


def addresses(decoder: Decoder) -> list[int]:
    """Where every tensor lies that a step takes, or that the engine hands to one."""
    assembly = decoder.assembly
    engine = assembly.engine
    tensors = [*engine.tree.tensors(), engine.target.order, engine.drafter.knots]
    for runner in (assembly.target, assembly.drafter):
        tensors += [*runner.weights, *runner.cache.tensors()]
    for owner in (engine.target, engine.drafter):
        tensors += [value.tensor for value in vars(owner).values() if isinstance(value, HostBuffer)]
    return [tensor.data_ptr() for tensor in tensors]


class OracleDrafter:
    """Knows the text that the target will write and offers it among wrong siblings; every third guess stops early."""

    name = "oracle"
    capabilities = Capabilities()

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)

    def extend(self, tokens: Sequence[int], states: object) -> None:
        self._length += len(tokens)

    def cost(self, budget: Budget) -> list[Step]:
        return [Step("own", budget.width or 1)]

    def propose(self, tree: object, budget: Budget) -> None:
        depth, width = budget.depth, budget.width
        node, right_levels = 0, depth - self._length % 3
        for level, token in enumerate(self._text[self._length : self._length + depth]):
            for other in range(1, width):
                tree.attach(node, (token + other) % VOCAB_SIZE, -2.0)
            node = tree.attach(node, token if level < right_levels else (token + width) % VOCAB_SIZE, -0.1)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 96 tokens: letters, pairs of letters, and single bytes of longer characters."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?-"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    single_bytes = [name for text in ("é", "😀") for name in byte_level.pre_tokenize_str(text)[0][0]]
    merges = [(left, right) for left in "aeiou" for right in "nrst"]
    names = ["<end>", "Ġ", "Ċ", *letters, *single_bytes, *map("".join, merges)]
    assert len(names) == len(set(names)) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokenizer with a chat template, whose turns end with ``<end>``."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}-{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}a-{% endif %}"
    )
    return tokenizer
