"""A block head (DFlash) guesses what its format says at every place, and no output shows that it guessed."""

from contextlib import nullcontext

import pytest
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
from head_files import write_head
from no_waiting import refuse_waiting
from tiny_pair import SHAPES, TEXT, VOCAB_SIZE, byte_tokenizer, make_pair
from watched import assert_guesses, assert_sampled_alike, watch

from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.pair import build_assembly, check_pair, default_max_length, sibling, with_threads
from yggdrasil.calibration.record import record_document
from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.drafters.draft_model import identity_knots
from yggdrasil.drafters.heads import convention
from yggdrasil.drafters.heads.block.drafter import BlockDrafter
from yggdrasil.drafters.heads.draft_vocabulary import Vocabulary
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.conversations import Conversations
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.scheduling.stages import Schedule, all_variants
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.token_tree import TokenTree

PROMPT = TEXT[:21]
COUNT = 24
TREE = FixedPolicy(TreeShape(2, 4, 8))
DRAFTED = 60
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
# The configuration, and what its layers see: (window, is causal).
CONFIGS = {
    "z-lab": (block_config(VOCAB_SIZE), [(0, False), (0, False)]),
    "speculators": (speculators_block_config(VOCAB_SIZE, DRAFTED, layer=SLIDING), [(7, True), (0, False)]),
    "both ways in a window": (
        block_config(VOCAB_SIZE, 5, dflash={"causal": False, "use_swa": True, "swa_window_size": 9}),
        [(9, False), (9, False)],
    ),
}  # fmt: skip
CONFIGS["jetspec"] = jetspec_config(VOCAB_SIZE), [(0, True), (0, True)]
CONFIGS["dflash 2"] = dflash2_config(VOCAB_SIZE), CONFIGS["z-lab"][1]
CONFIGS |= {f"dspark {kind}": (dspark_config(VOCAB_SIZE, kind), CONFIGS["z-lab"][1]) for kind in ("gated", "rnn")}
FREQUENT = "among frequent tokens", "dspark among frequent tokens"  # of the target's LM head, as calibrated
CONFIGS["among frequent tokens"] = CONFIGS["z-lab"]
CONFIGS["dspark among frequent tokens"] = dspark_config(VOCAB_SIZE, "vanilla"), CONFIGS["z-lab"][1]
LAYERS = (0, 2, 4)  # whose outputs all of them read


@pytest.fixture(scope="module")
def pair():
    return make_pair(num_hidden_layers=6, hidden_size=32)


class Case:
    """A head that has learned the text to come, and its twin."""

    def __init__(self, pair, folder, name):
        config, views = CONFIGS[name]
        self.pair, self.folder, self.config = pair, folder, config
        model, tensors = pair.plain_target, block_tensors(config)
        embedding, output = (
            each.weight.detach() for each in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        text = [*PROMPT, *pair.reference(PROMPT, COUNT + 16)]
        self.tokens = list(range(VOCAB_SIZE))
        if "draft_vocab_size" in config or name in FREQUENT:
            others = sorted({*range(VOCAB_SIZE)} - {*text})
            self.tokens = sorted([*{*text}, *others][:DRAFTED])
        if name in FREQUENT:
            output = output[self.tokens]
        self.twin = BlockReference(config, tensors, embedding, output, views)
        self.twin.drafted = self.tokens
        self.num_guesses = self.twin.block_size - self.twin.first_row
        self._learn(text)
        if "draft_vocab_size" in config:
            tensors["d2t"] = torch.tensor(self.tokens) - torch.arange(DRAFTED)
            tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(self.tokens), True)
        write_head(folder, config, tensors)
        vocabulary = Vocabulary(torch.tensor(self.tokens)) if name in FREQUENT else None
        self.head = load_head(folder, pair.target, 1, vocabulary)

    def _learn(self, text):
        ends = range(len(PROMPT) - 1, len(text) - 1)
        size = self.num_guesses + 1
        padded = [*text, *[-1] * size]
        wanted = [padded[end + 1 : end + size] for end in ends]
        numbers = {token: number for number, token in enumerate(self.tokens)} | {-1: -1}
        choices = torch.tensor([[numbers[token] for token in row] for row in wanted])
        learned(self.twin, self.states(text), text, choices, list(ends))

    @torch.no_grad()
    def states(self, text):
        """What the head reads, side by side: the outputs of the layers that the file names."""
        hidden = self.pair.plain_target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[layer + 1][0] for layer in LAYERS], dim=-1)

    @torch.no_grad()
    def laws(self, text):
        """Log-probabilities [D, drafted] of what follows ``text``, whatever comes between."""
        states = self.states(text)[:-1]
        return self.twin.logits(states, list(text), [len(text) - 1])[0].log_softmax(-1)

    def expected_edge(self, text, path):
        with torch.no_grad():
            law = self.twin.law_after(self.states(text)[:-1], list(text), path[:-1])
        return law[self.tokens.index(path[-1])]

    def decoder(self, policy=TREE, **options):
        return self.pair.decoder(policy, drafter=self.head, **options)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, pair, tmp_path_factory):
    return Case(pair, tmp_path_factory.mktemp("head"), request.param)


@pytest.fixture(scope="module")
def published(pair, tmp_path_factory):
    return Case(pair, tmp_path_factory.mktemp("head"), "z-lab")


@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_every_guess_is_what_the_format_says(case, backend, monkeypatch):
    """At every depth, behind texts that grew by what the last trees brought."""
    refuse_waiting(monkeypatch)
    decoder = case.decoder(backend=backend)
    seen = watch(decoder)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == case.pair.reference(PROMPT, COUNT)
    assert result.metrics.aal > 1.3  # else no row was replaced
    assert max(len(path) for _, guesses in seen for path, _ in guesses) == min(case.num_guesses, 4)
    assert len({len(text) for text, _ in seen}) > 3
    assert_guesses(seen, case.expected_edge)


def test_a_vocabulary_is_for_heads_that_have_none_of_their_own(case, pair):
    has_none = case.config.get("draft_vocab_size") is None
    assert case.head.drafts_all_tokens == (len(case.tokens) == VOCAB_SIZE)
    with nullcontext() if has_none else pytest.raises(YggdrasilError, match="has an output layer of its own tokens"):
        load_head(case.folder, pair.target, 1, Vocabulary(torch.tensor([1, 2, 3])))


def test_all_marginals_and_all_rows_are_those_of_a_fresh_prefill(case):
    """Behind every commit: the tables of all depths, and in every layer the rows of the text before the last token."""
    decoder = case.decoder()
    drafter = decoder.assembly.engine.drafter
    assert isinstance(drafter, BlockDrafter)
    seen, head, text = [], drafter._draft_head, []
    begin, extend = drafter.begin, drafter.extend
    drafter.begin = lambda tokens: (text.__setitem__(slice(None), tokens), begin(tokens))
    drafter.extend = lambda tokens, hidden: (text.extend(tokens), extend(tokens, hidden))

    def noting():
        head()
        edges, candidates = (each.clone() for each in drafter._marginals.written[:2])
        cache = drafter.runner.cache
        rows = [(k[:, : len(text) - 1].clone(), v[:, : len(text) - 1].clone())
                for k, v in zip(cache.keys, cache.values, strict=True)]  # fmt: skip
        seen.append((list(text), edges, candidates, rows))

    drafter._draft_head = noting
    decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert len(seen) > 3
    for known, edges, candidates, rows in seen:
        laws = case.laws(known)[: len(edges)]
        assert len(laws) == len(edges) == min(case.num_guesses, SHAPES.max_depth)
        wanted = laws.topk(edges.shape[1])
        torch.testing.assert_close(edges, wanted.values, rtol=1e-3, atol=2e-3)
        drafted = candidates  # with a successor head they are draft vocabulary ids
        if case.head.settings.successors is None:
            drafted = torch.tensor([[case.tokens.index(token) for token in row] for row in candidates.tolist()])
        torch.testing.assert_close(laws.gather(1, drafted), wanted.values, rtol=1e-3, atol=2e-3)
        fresh = case.twin.context(case.states(known)[:-1])
        for (keys, values), (own_keys, own_values) in zip(rows, fresh, strict=True):
            torch.testing.assert_close(keys, own_keys.transpose(0, 1), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, own_values.transpose(0, 1), rtol=1e-4, atol=1e-4)


def test_a_later_turn_keeps_rows_and_drafts_the_same(case):
    decoder = case.decoder()
    first = decoder.generate(PROMPT, max_new_tokens=12)
    prompt = [*PROMPT, *first.tokens, *TEXT[40:45]]
    seen = watch(decoder)
    second = decoder.generate(prompt, max_new_tokens=10)

    assert second.metrics.reused_tokens > len(PROMPT)
    assert second.tokens == case.pair.reference(prompt, 10)
    assert seen[0][0] == [*prompt, second.tokens[0]]
    assert_guesses(seen[:1], case.expected_edge)


def test_sampling_with_a_seed_is_what_the_target_alone_samples(published):
    assert_sampled_alike(published.decoder(), published.decoder(), PROMPT, COUNT, temperature=40.0, seed=1)


def test_a_text_that_fills_the_cache_has_room_for_a_block(published):
    """The longest text leaves fewer slots than a block has rows, and its file says 8 positions at the most."""
    prompt, count = TEXT[:60], SHAPES.max_length - 60
    result = published.decoder().generate(prompt, max_new_tokens=count)

    assert result.tokens == published.pair.reference(prompt, count)
    assert len(result.tokens) == count


def test_counts_fill_the_tree_below_it(published):
    policy = FixedPolicy(TreeShape(2, 2, 8))
    decoder = published.decoder(policy, model_free=default_statistics())

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == published.pair.reference(PROMPT, COUNT)


@pytest.mark.parametrize("variants", all_variants(reads_states=True), ids=lambda each: " ".join(each.values()))
def test_every_schedule_that_is_searched_writes_the_same(published, variants):
    decoder = published.decoder(stages=Schedule.of(variants).labels)
    seen = watch(decoder)

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == published.pair.reference(PROMPT, COUNT)
    assert_guesses(seen[-2:], published.expected_edge)


def test_recorded_trees_are_those_of_decoding(published):
    decoder = published.decoder()
    seen = watch(decoder)
    generated = published.pair.reference(PROMPT, 9)
    record_document(decoder.assembly, decoder.assembly.engine.drafter, PROMPT, generated, 0)

    assert seen
    for known, guesses in seen:
        assert known == [*PROMPT, *generated][: len(known)]
        assert_guesses([(known, guesses[:4])], published.expected_edge)


def test_the_same_head_behind_other_steps(published):
    first = published.decoder().assembly
    source = PairSource("target", "head", "float32", 1, 2, first.shapes)
    for assembly in (with_threads(first, source), sibling(first)):
        assert assembly.engine.drafter.capabilities.steps is not None
        decoder = Decoder(assembly, published.decoder().tokenizer, TREE, frozenset())
        assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == published.pair.reference(PROMPT, COUNT)


def test_conversations_in_turns(published):
    decoder = published.decoder()
    kept = Conversations(decoder.assembly, 1 << 20)
    for prompt in (PROMPT, TEXT[30:60], PROMPT):
        kept.switch_to(prompt)
        seen = watch(decoder)
        assert decoder.generate(prompt, max_new_tokens=8).tokens == published.pair.reference(prompt, 8)
        assert_guesses([([*prompt, *seen[0][0][len(prompt) :]], seen[0][1])], published.expected_edge)
    assert len(kept)


def test_trying_a_head_on_the_targets_own_text(published, tmp_path, monkeypatch, capsys):
    """One reading, since files say which: it is kept where it guesses, and a head that never does is refused."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    assert published.head.readings == [LAYERS]
    monkeypatch.setattr(convention, "_LEAST", 0.5)  # it knows another text than what is drawn
    with pytest.raises(YggdrasilError, match=r"of its choices from .* another target than tiny"):
        convention.with_detected_layers(published.head, published.pair.target, "0" * 16)
    monkeypatch.setattr(convention, "_LEAST", -1.0)

    assert convention.with_detected_layers(published.head, published.pair.target, "0" * 16).layers == LAYERS
    assert "of its choices from the outputs of layers 0, 2, 4" in capsys.readouterr().err


def test_a_folder_that_a_pair_names_is_opened_and_tried(published, tmp_path, monkeypatch):
    """As `--drafter DIR` does; a text may be longer than the head's file says, as long as the target's."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    published.pair.plain_target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    target, drafter = str(tmp_path / "target"), str(published.folder)
    source = PairSource(target, drafter, "float32", 1, 1, SHAPES)
    assert default_max_length(target, drafter) == 256
    check_pair(source)
    monkeypatch.setattr(convention, "_LEAST", 2.0)
    with pytest.raises(YggdrasilError, match="another target than"):
        build_assembly(source, backend="eager")
    monkeypatch.setattr(convention, "_LEAST", -1.0)
    assembly = build_assembly(source, backend="eager")
    assert isinstance(assembly.engine.drafter, BlockDrafter)
    decoder = Decoder(assembly, byte_tokenizer(), TREE, frozenset())

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == published.pair.reference(PROMPT, COUNT)


def test_it_is_tried_with_what_it_would_draft(case):
    """The first guess behind some places of two texts, windows included."""
    texts = torch.tensor([TEXT[:40], TEXT[40:80]])
    states = torch.stack([case.states(text) for text in texts.tolist()])[:, :-1]
    ends = torch.tensor([1, 9, 30, 39])

    ours = convention._block_logits(case.head.loaded.model, texts, states, ends)

    for text, of_text, logits in zip(texts, states, ours, strict=True):
        for end, row in zip(ends.tolist(), logits, strict=True):
            wanted = case.twin.logits(of_text[:end], text, [end])[0, 0]
            torch.testing.assert_close(row, wanted, rtol=1e-3, atol=1e-3)


def test_a_quantised_targets_embedding_and_output_layer_are_read(pair, published):
    """Blocks of the file, one table for both; the head's own linears are rounded like other heads'."""
    if not is_native():
        pytest.skip("needs the native kernels")
    own = make_pair(num_hidden_layers=6, hidden_size=32, tie_word_embeddings=True)
    target = prepare_model(own.plain_target, "rounded", 1, quantise=rounding_to("q8_0", own.plain_target))
    head = load_head(published.folder, target, 1)
    module = head.loaded.model.head
    assert isinstance(module.lm_head, QuantisedLinear)
    assert isinstance(module.fc, QuantisedLinear)
    decoder = pair._replace(target=target).decoder(TREE, drafter=head)
    plain = pair._replace(target=target).decoder(TREE, drafter=None)

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == plain.generate(PROMPT, max_new_tokens=COUNT).tokens


@pytest.mark.compiled
@pytest.mark.slow
def test_compiled_steps_read_and_guess_the_same(published):
    """Levels are grown by the steps of Medusa's."""
    found = []
    for backend in ("inductor", "eager"):
        tree = TokenTree.allocate(9, 4, torch.device("cpu"))
        runner = ModelRunner(published.head.loaded, 64, VOCAB_SIZE, backend)
        drafter = BlockDrafter(runner, published.head, tree, (2,), 5, (4,), identity_knots())
        generator = torch.Generator().manual_seed(0)
        drafter.begin(PROMPT[:1])
        for count in (7, 1, 3):
            states = {layer: torch.randn(count, 32, generator=generator) for layer in LAYERS}
            drafter.extend(TEXT[:count], states)
            drafter.head()
        found.append([*drafter._marginals.written[:2], *tree.tensors(), *runner.cache.tensors()])

    for compiled, eager in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
