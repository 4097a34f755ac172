"""Heads of every kind that have learned the text to come, each with the slow twin that says what it must draft."""

from functools import cached_property

import torch
from block_files import (
    BlockReference,
    block_config,
    block_tensors,
    dflash2_config,
    dspark_config,
    jetspec_config,
    learned,
    speculators_block_config,
)
from head_files import Reference, eagle_config, published_tensors, speculators_config, write_head
from mtp_models import FAMILIES, PROJECTIONS, random_module, tiny_target, write_target
from mtp_models import Reference as MtpReference
from other_heads import (
    FirstReference,
    first_config,
    first_shapes,
    medusa_logits,
    medusa_shapes,
    random_tensors,
    write_medusa,
)
from tiny_pair import TEXT, VOCAB_SIZE, TinyPair
from torch.nn.functional import one_hot

from yggdrasil.drafters.heads.draft_vocabulary import Vocabulary
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import load_model
from yggdrasil.tree.shape import TreeShape

PROMPT, COUNT, HIDDEN = TEXT[:21], 24, 32
DRAFTED = 60
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
LAYER = {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 7}
EAGLE = {
    "eagle 3": (eagle_config(VOCAB_SIZE), "midlayer."),
    "eagle 3 of speculators": (
        speculators_config(VOCAB_SIZE, layer=LAYER, norm_before_residual=True, norm_output=True), "layers.0.",
    ),
}  # fmt: skip
# The configuration, and what its layers see: (window, is causal).
BLOCKS = {
    "z-lab": (block_config(VOCAB_SIZE), [(0, False), (0, False)]),
    "speculators": (speculators_block_config(VOCAB_SIZE, DRAFTED, layer=SLIDING), [(7, True), (0, False)]),
    "both ways in a window": (
        block_config(VOCAB_SIZE, 5, dflash={"causal": False, "use_swa": True, "swa_window_size": 9}),
        [(9, False), (9, False)],
    ),
    "jetspec": (jetspec_config(VOCAB_SIZE), [(0, True), (0, True)]),
}  # fmt: skip
for _name, _config in {
    "dflash 2": dflash2_config(VOCAB_SIZE),
    "dspark gated": dspark_config(VOCAB_SIZE, "gated"),
    "dspark rnn": dspark_config(VOCAB_SIZE, "rnn"),
    "among frequent tokens": block_config(VOCAB_SIZE),  # of the target's LM head, as calibrated
    "dspark among frequent tokens": dspark_config(VOCAB_SIZE, "vanilla"),
}.items():
    BLOCKS[_name] = _config, BLOCKS["z-lab"][1]
LAYERS = (0, 2, 4)  # whose outputs all block heads read, of a target of six layers


def layers_read(target):
    """Those of LAYERS that a model of transformers has before its last."""
    return [layer for layer in LAYERS if layer < target.config.num_hidden_layers - 1]


def config_for(config, target):
    """``config`` of a head for ``target``, a model of transformers: its hidden size, and layers that it has."""
    part, layers = "transformer_layer_config", layers_read(target)
    size = {"hidden_size": target.config.hidden_size}
    config = {**config, **({part: {**config[part], **size}} if part in config else size)}
    if "num_target_layers" in config:
        config["num_target_layers"] = target.config.num_hidden_layers
    if "dflash_config" in config:
        config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": layers}
    elif "target_layer_ids" in config:
        config["target_layer_ids"] = layers
    elif config.get("speculators_model_type") == "dflash":  # by their inputs
        config["aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
    return config


class HeadCase:
    """A head on disk behind its target; a subclass writes it and makes its twin."""

    shape, backend = TreeShape(2, 4, 8), "native"
    deepest = 3  # tokens of the longest guess
    temperature = 40.0
    vocabulary = None  # the draft vocabulary that it is loaded with
    tokens = range(VOCAB_SIZE)  # that it drafts

    def __init__(self, pair, folder):
        self.pair, self.folder, self._hidden, self._laws = pair, folder, {}, {}

    @cached_property
    def head(self):
        return load_head(self.folder, self.pair.target, 1, self.vocabulary)

    def decoder(self, policy=None, **options):
        settings = {"drafter": self.head, "backend": self.backend, **options}
        return self.pair.decoder(policy or FixedPolicy(self.shape), **settings)

    @torch.no_grad()
    def hidden(self, text):
        """Hidden states of every layer at every position, the input of the target's LM head last; computed once."""
        if (key := tuple(text)) not in self._hidden:
            self._hidden[key] = self.pair.plain_target(torch.tensor([key]), output_hidden_states=True).hidden_states
        return self._hidden[key]

    def states(self, text):
        """What the head reads at every position."""
        return self.hidden(text)[-1][0]

    def expected_edge(self, text, path):
        """Log-probability of the path's last token, drafted behind ``text`` and the rest of the path."""
        *before, last = path
        if (key := (tuple(text), tuple(before))) not in self._laws:
            self._laws[key] = self.law(text, before)
        return self._laws[key][self.tokens.index(last)]

    @torch.no_grad()
    def law(self, text, path):
        """Log-probabilities of the ``tokens`` after ``text``, whose states are known, and a drafted path."""
        features, tokens = self.twin.feature(self.states(text)[:-1]), torch.tensor([*text[1:], *path])
        for length in range(len(text) - 1, len(tokens) + 1):
            rows = torch.arange(length)
            outputs, logits = self.twin.rows(tokens[:length], features, rows, rows[:, None] >= rows)
            features = torch.cat([features, self.twin.next_feature(outputs[-1:])])
        law, tokens = logits[-1], list(self.tokens)
        return (law if len(law) == len(tokens) else law[tokens]).log_softmax(-1)


class EagleCase(HeadCase):
    """A head of EAGLE-3 that can draft the tokens that the target will write and few others."""

    shape, deepest = TreeShape(4, 3, 8), 2

    def __init__(self, pair, folder, name="eagle 3"):
        super().__init__(pair, folder)
        config, spelling = EAGLE[name]
        config = config_for(config, pair.plain_target)
        self.tokens = sorted({*pair.reference(PROMPT, COUNT), *range(6)})
        config = {**config, "draft_vocab_size": len(self.tokens)}
        tensors = published_tensors(config, spelling=spelling) | vocabulary_tables(self.tokens)
        write_head(folder, config, tensors)
        self.twin = Reference(config, tensors, pair.plain_target.get_input_embeddings().weight, spelling=spelling)

    def states(self, text):
        hidden = self.hidden(text)
        return torch.cat([hidden[layer + 1][0] for layer in self.head.layers], dim=-1)


class FirstCase(HeadCase):
    """An EAGLE-1 head that knows the text to come by heart, but for what its layer adds at random."""

    def __init__(self, pair, folder):
        super().__init__(pair, folder)
        config = config_for(first_config(VOCAB_SIZE, rms_norm_eps=1e-5), pair.plain_target)
        table, output = ends_of(pair.plain_target)
        text = torch.tensor([*PROMPT, *pair.reference(PROMPT, COUNT + 8)])
        states = self.states(text.tolist())
        tensors = random_tensors(first_shapes(config), scale=0.02)
        fitted = solved(torch.cat([table[text[1:]], states[:-1], torch.ones(len(text) - 1, 1)], dim=-1), states[1:])
        tensors |= {"fc.weight": fitted[:, :-1].contiguous(), "fc.bias": fitted[:, -1].contiguous()}
        write_head(folder, config, tensors)
        self.twin = FirstReference(config, tensors, table, output)


class MedusaCase(HeadCase):
    """Three heads of Medusa that know much of the text to come."""

    def __init__(self, pair, folder):
        super().__init__(pair, folder)
        text = [*PROMPT, *pair.reference(PROMPT, COUNT + 8)]
        states = self.states(text)
        self.tensors = random_tensors(medusa_shapes(states.shape[1], VOCAB_SIZE, 3), scale=0.02)
        for head in range(3):
            wanted = one_hot(torch.tensor(text[2 + head :]), VOCAB_SIZE) * 12.0
            self.tensors[f"{head}.1.weight"] = solved(states[: len(wanted)], wanted)
        write_medusa(folder, self.tensors)

    def law(self, text, path):
        return medusa_logits(self.tensors, self.states(text)[-2:-1], len(path))[0].log_softmax(-1)


class BlockCase(HeadCase):
    """A block head that has learned the text to come."""

    def __init__(self, pair, folder, name="z-lab"):
        super().__init__(pair, folder)
        self.config, views = BLOCKS[name]
        self.config = config_for(self.config, pair.plain_target)
        tensors, (embedding, output) = block_tensors(self.config), ends_of(pair.plain_target)
        text = [*PROMPT, *pair.reference(PROMPT, COUNT + 16)]
        is_own, is_frequent = "draft_vocab_size" in self.config, "frequent" in name
        if is_own or is_frequent:
            others = sorted({*range(VOCAB_SIZE)} - {*text})
            self.tokens = sorted([*{*text}, *others][:DRAFTED])
        self.tokens = list(self.tokens)
        self.twin = BlockReference(
            self.config, tensors, embedding, output[self.tokens] if is_frequent else output, views
        )
        self.twin.drafted = self.tokens
        self.num_guesses = self.twin.block_size - self.twin.first_row
        self.deepest = min(self.num_guesses, self.shape.depth)
        self._learn(text)
        write_head(folder, self.config, tensors | (vocabulary_tables(self.tokens) if is_own else {}))
        self.vocabulary = Vocabulary(torch.tensor(self.tokens)) if is_frequent else None

    def _learn(self, text):
        ends, size = range(len(PROMPT) - 1, len(text) - 1), self.num_guesses + 1
        padded = [*text, *[-1] * size]
        numbers = {token: number for number, token in enumerate(self.tokens)} | {-1: -1}
        choices = torch.tensor([[numbers[token] for token in padded[end + 1 : end + size]] for end in ends])
        learned(self.twin, self.states(text), text, choices, list(ends))

    def states(self, text):
        hidden = self.hidden(text)
        return torch.cat([hidden[layer + 1][0] for layer in layers_read(self.pair.plain_target)], dim=-1)

    @torch.no_grad()
    def laws(self, text):
        """Log-probabilities [D, drafted] of what follows ``text``, whatever comes between."""
        return self.twin.logits(self.states(text)[:-1], list(text), [len(text) - 1])[0].log_softmax(-1)

    @torch.no_grad()
    def law(self, text, path):
        return self.twin.law_after(self.states(text)[:-1], list(text), path)


class MtpCase(HeadCase):
    """A target on disk whose module knows the text to come, but for what its layer adds at random."""

    shape, deepest, temperature = TreeShape(2, 3, 8), 2, 20.0

    def __init__(self, folder, family):
        model, module = tiny_target(family), random_module(family)
        super().__init__(TinyPair(None, None, model, None), folder)
        self.twin, self.family = MtpReference(family, module, model), family
        text = torch.tensor([*PROMPT, *self.pair.reference(PROMPT, COUNT + 8)])
        states = self.states(text.tolist())
        module[PROJECTIONS[family]] = solved(self.twin.fused(text[1:], states[:-1]), states[1:])
        write_target(folder, family, model, module)
        self.pair = self.pair._replace(target=load_model(str(folder), torch.float32, torch.device("cpu"), 1))
        if family in ("glm4_moe", "ernie4_5_moe", "qwen3_next"):
            self.backend = "eager"  # their steps are compiled, which would take minutes


def make_case(name, pair, folder):
    """The case of that name in ``folder``; ``pair`` is a target with its untouched copy."""
    if name in FAMILIES:
        return MtpCase(folder, name)
    if name in ("eagle 1", "medusa"):
        return (FirstCase if name == "eagle 1" else MedusaCase)(pair, folder)
    return (EagleCase if name in EAGLE else BlockCase)(pair, folder, name)


CASES = (*EAGLE, "eagle 1", "medusa", *BLOCKS, *FAMILIES)
FEW = (*EAGLE, "eagle 1", "medusa", "z-lab")  # a case for each drafter and option of its rows


def vocabulary_tables(tokens):
    """A file's two tables of the ``tokens`` that are drafted."""
    tokens = torch.tensor(tokens)
    drafted = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, tokens, True)
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": drafted}


def ends_of(model):
    """A model's embedding and LM head, [V, H] each."""
    return [each.weight.detach() for each in (model.get_input_embeddings(), model.get_output_embeddings())]


def solved(inputs, outputs):
    """The weight [N, K] of the linear layer that turns ``inputs`` [T, K] into ``outputs`` [T, N], as well as may be."""
    return torch.linalg.lstsq(inputs, outputs.to(inputs.dtype), driver="gelsd").solution.T.contiguous()
