"""A head that drafts: every guess is what the format says at its place, and no output shows that it guessed."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from head_files import Reference, eagle_config, published_tensors, speculators_config, write_head
from no_waiting import refuse_waiting
from tiny_pair import SHAPES, TEXT, VOCAB_SIZE, byte_tokenizer, make_pair
from watched import assert_guesses, assert_sampled_alike, watch

from yggdrasil import Speculation
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.documents import open_ended_stream
from yggdrasil.calibration.measurement.schedules import measure_stage_costs, measured_schedules
from yggdrasil.calibration.pair import sibling, with_threads
from yggdrasil.calibration.record import record_document
from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.drafters.heads.eagle.drafter import HeadDrafter
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.conversations import Conversations
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.scheduling.costs import StageCosts
from yggdrasil.scheduling.search import AcceptedLengths, Space, search
from yggdrasil.scheduling.stages import NAMED_WITH_STATES, Schedule, all_variants
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PROMPT = TEXT[:21]
COUNT = 24
TREE = FixedPolicy(TreeShape(4, 3, 8))
LAYER = {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 7}
CONFIGS = {
    "eagle": (eagle_config(VOCAB_SIZE), "midlayer."),
    "speculators": (
        speculators_config(VOCAB_SIZE, layer=LAYER, norm_before_residual=True, norm_output=True), "layers.0.",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    return make_pair(num_hidden_layers=6, hidden_size=32)


class Case:
    """A target, a head that can draft the tokens that the target will write and few others, and its twin."""

    def __init__(self, pair, folder, name):
        config, spelling = CONFIGS[name]
        tokens = sorted({*pair.reference(PROMPT, COUNT), *range(6)})
        config = {**config, "draft_vocab_size": len(tokens)}
        tensors = published_tensors(config, spelling=spelling)
        tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(tokens), True)
        self.tokens, self.pair = tokens, pair
        self.folder = write_head(folder, config, tensors)
        self.head = load_head(self.folder, pair.target, 1)
        embedding = pair.plain_target.get_input_embeddings().weight
        self.twin = Reference(config, tensors, embedding, spelling=spelling)

    def decoder(self, **options):
        return self.pair.decoder(TREE, drafter=self.head, **options)

    @torch.no_grad()
    def expected_edge(self, text, path):
        """Log-probability of the path's last token, drafted behind ``text`` and the rest of the path."""
        hidden = self.pair.plain_target(torch.tensor([text]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer + 1][0] for layer in self.head.layers], dim=-1)[:-1]
        features, tokens = self.twin.feature(states), torch.tensor([*text[1:], *path])
        for length in range(len(text) - 1, len(text) - 1 + len(path)):
            rows = torch.arange(length)
            outputs, logits = self.twin.rows(tokens[:length], features, rows, rows[:, None] >= rows)
            features = torch.cat([features, self.twin.next_feature(outputs[-1:])])
        return logits[-1].log_softmax(-1)[self.tokens.index(path[-1])]


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, pair, tmp_path_factory):
    return Case(pair, tmp_path_factory.mktemp("head"), request.param)


@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_every_guess_is_what_the_format_says(case, backend, monkeypatch):
    """Behind paths of every length: what the head drafted on its own outputs has left nothing behind."""
    refuse_waiting(monkeypatch)
    decoder = case.decoder(backend=backend)
    seen = watch(decoder)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == case.pair.reference(PROMPT, COUNT)
    assert result.metrics.aal > 1.3  # else no row was replaced
    assert len({len(text) for text, _ in seen}) > 5
    assert_guesses(seen, case.expected_edge)


def test_a_later_turn_keeps_rows_and_drafts_the_same(case):
    decoder = case.decoder()
    first = decoder.generate(PROMPT, max_new_tokens=12)
    prompt = [*PROMPT, *first.tokens, *TEXT[40:45]]
    seen = watch(decoder)
    second = decoder.generate(prompt, max_new_tokens=10)
    fresh = case.decoder().generate(prompt, max_new_tokens=10)

    assert second.metrics.reused_tokens > len(PROMPT)
    assert second.tokens == fresh.tokens == case.pair.reference(prompt, 10)
    assert seen[0][0] == [*prompt, second.tokens[0]]
    assert_guesses(seen[:1], case.expected_edge)


def test_conversations_that_take_turns_are_read_once_beside_a_head(case):
    """Also where its last request made the head read nothing."""
    decoder = case.decoder()
    conversations = Conversations(decoder.assembly, 1 << 30)
    texts, read = [list(TEXT[:21]), list(TEXT[30:52])], []
    for count in (1, 8, 8):
        for text in texts:
            conversations.switch_to(text)
            found = decoder.generate(text, max_new_tokens=count)
            assert found.tokens == case.pair.reference(text, count)
            read.append(len(text) - found.metrics.reused_tokens)
            text += [*found.tokens, *TEXT[7:10]]
    assert read[:2] == [21, 22]
    assert max(read[2:]) <= 3 + 2  # what is new, the answer's last token, and what its last block left unread


def test_a_prompt_that_the_head_read_nothing_of_is_not_read_again(case):
    decoder = case.decoder()
    decoder.generate(PROMPT, max_new_tokens=1)
    seen = watch(decoder)
    again = decoder.generate(PROMPT, max_new_tokens=8)

    assert again.metrics.reused_tokens == len(PROMPT) - 1
    assert again.tokens == case.pair.reference(PROMPT, 8)
    assert_guesses(seen, case.expected_edge)


class TakingTurns(FixedPolicy):
    """A tree of the counts alone, a drafted one that they fill, and a plain step, over and over."""

    wants_model_free = True

    def __init__(self):
        super().__init__(TreeShape(4, 3, 8))
        self._asked = 0

    def choose(self, context, model_free=None, features=None):
        self._asked += model_free is not None
        if model_free is not None and self._asked % 3 == 0 and model_free.expected[-1] > 1.0:
            return Decision(TreeShape(0, model_free.depth, 8))
        return Decision(PLAIN_STEP) if self._asked % 3 == 1 else self._decision


def test_what_counts_guess_in_its_place_leaves_a_heads_rows_as_they_were(case):
    """It has read neither the free trees nor the plain steps when it is asked again."""
    decoder = case.pair.decoder(TakingTurns(), drafter=case.head, model_free=default_statistics())
    seen = watch(decoder)
    prompt = [*PROMPT, *PROMPT]
    result = decoder.generate(prompt, max_new_tokens=2 * COUNT)

    assert result.tokens == case.pair.reference(prompt, 2 * COUNT)
    assert result.metrics.model_free_trees > 2
    assert result.metrics.plain_steps > 2
    assert len(seen) > 2
    assert_guesses(seen, case.expected_edge)


def test_sampling_with_a_seed_is_what_the_target_alone_samples(case):
    assert_sampled_alike(case.decoder(), case.decoder(), PROMPT, COUNT, temperature=40.0, seed=1)


@pytest.mark.parametrize("variants", all_variants(reads_states=True), ids=lambda each: " ".join(each.values()))
def test_every_schedule_that_is_searched_writes_the_same(case, variants):
    decoder = case.decoder(stages=Schedule.of(variants).labels)
    seen = watch(decoder)

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == case.pair.reference(PROMPT, COUNT)
    assert_guesses(seen[-2:], case.expected_edge)


def test_what_stages_cost_with_a_head_is_enough_to_search_with(case):
    schedules, shapes = (
        measured_schedules(NAMED_WITH_STATES),
        replace(SHAPES, draft_widths=(1, 2), verify_widths=(1, 4)),
    )
    decoder = case.decoder(shapes=shapes, other_stages=[schedule.labels for schedule in schedules])
    new_stream = partial(open_ended_stream, byte_tokenizer(), 16)
    frame = measure_stage_costs(decoder.assembly, new_stream, [PROMPT], 1, lambda _: None, schedules)
    ratios = {width: np.full((4, 4, 2), 0.5) for width in shapes.draft_widths}
    lengths = AcceptedLengths(np.full(4, 0.9), ratios, shapes.verify_widths)

    space = Space.of(lengths, "in-order", reads_states=True)
    found = search(space, {"one": StageCosts.from_samples(frame)}, lengths)

    assert len(list(space.schedules())) == 8
    assert found[0].iteration_ms > 0


def test_recorded_trees_are_those_of_decoding(case):
    """Every position of a text, with the target's states up to it and none behind it."""
    decoder = case.decoder()
    seen = watch(decoder)
    generated = case.pair.reference(PROMPT, 9)
    record_document(decoder.assembly, decoder.assembly.engine.drafter, PROMPT, generated, 0)

    text = [*PROMPT, *generated]
    assert {len(known) for known, _ in seen} == set(range(len(PROMPT) + 1, len(text) - SHAPES.max_depth + 1))
    for known, guesses in seen:
        assert known == text[: len(known)]
        for path, edge in guesses[:3]:
            assert edge == pytest.approx(float(case.expected_edge(known, path)), abs=2e-3)


def test_the_same_head_behind_other_steps(case):
    """As calibration builds them: on other thread counts, and with other shapes."""
    source = PairSource("target", "head", "float32", 1, 2, SHAPES)
    first = case.decoder().assembly
    for assembly in (with_threads(first, source), sibling(first)):
        assert isinstance(assembly.engine.drafter, HeadDrafter)
        decoder = Decoder(assembly, case.decoder().tokenizer, TREE, frozenset())
        assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == case.pair.reference(PROMPT, COUNT)


def test_what_needs_a_draft_model_is_refused(case):
    with pytest.raises(YggdrasilError, match="need a draft model"):
        case.decoder().generate(PROMPT, max_new_tokens=4, speculation=Speculation(expansion=(2, 1)))


def test_a_head_of_another_target_is_refused(case, tmp_path):
    other = make_pair(num_hidden_layers=6)

    with pytest.raises(YggdrasilError, match="a hidden size of 32, and tiny target has 64"):
        load_head(case.folder, other.target, 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, "reads layer 7 of its target, and tiny target has 6"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "layer_convention": "outputs"},
            "reads layer 6 of its target, and tiny target has 6",
        ),
        ({"hidden_size": 64, "target_hidden_size": 32}, "a hidden size of 64, and tiny target has 32"),
    ],
    ids=["layers that there are not", "outputs that there are not", "another embedding"],
)
def test_a_head_that_reads_what_the_target_has_not_is_refused(pair, tmp_path, more, said):
    config = eagle_config(VOCAB_SIZE, **more)
    with pytest.raises(YggdrasilError, match=said):
        load_head(write_head(tmp_path / "head", config, published_tensors(config)), pair.target, 1)


def test_a_quantised_targets_embedding_is_read_as_the_target_reads_it(pair, tmp_path):
    """Its table is kept in blocks, which the head shares."""
    if not is_native():
        pytest.skip("needs the native kernels")
    wide = make_pair(num_hidden_layers=2, hidden_size=64).plain_target
    target = prepare_model(wide, "rounded", 1, quantise=rounding_to("q8_0", wide))
    config = eagle_config(VOCAB_SIZE, hidden_size=64)
    head = load_head(write_head(tmp_path, config, published_tensors(config)), target, 1)
    tokens = torch.tensor([1, 5, 90])

    ours = head.loaded.model.embedding(tokens)

    torch.testing.assert_close(ours, wide.get_input_embeddings()(tokens))


@pytest.mark.parametrize("kind", ["quantised", "bfloat16"])
def test_beside_a_target_that_is_not_in_float32_a_head_has_four_bits(pair, tmp_path, kind):
    """It drafts nearly what it did, and the target decides as before."""
    if not is_native():
        pytest.skip("needs the native kernels")
    plain = make_pair(num_hidden_layers=6, hidden_size=32).plain_target
    if kind == "bfloat16":
        target = prepare_model(plain.bfloat16(), "narrow", 1)
    else:
        target = prepare_model(plain, "rounded", 1, quantise=rounding_to("q8_0", plain))
    case = Case(pair, tmp_path, "eagle")
    rounded, whole = load_head(case.folder, target, 1), load_head(case.folder, pair.target, 1)
    states = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))

    layers = {name: type(module) for name, module in rounded.loaded.model.head.named_modules()}
    assert layers["fc"] is layers["lm_head"] is layers["midlayer.self_attn.q_proj"] is QuantisedLinear
    ours, theirs = (head.loaded.model.head.feature(states.to(head.loaded.dtype)) for head in (rounded, whole))
    assert 0.01 < (ours.float() - theirs).norm() / theirs.norm() < 0.15
    decoder = Decoder(assemble(target, rounded, SHAPES, "eager"), byte_tokenizer(), TREE, frozenset())
    drafted = decoder.generate(PROMPT, max_new_tokens=COUNT)
    assert drafted.tokens == decoder.generate(PROMPT, max_new_tokens=COUNT, speculation=False).tokens
    assert drafted.metrics.aal > 1.0


@pytest.mark.compiled
def test_compiled_steps_draft_what_eager_ones_do(pair, tmp_path):
    case = Case(pair, tmp_path, "eagle")
    compiled, eager = case.decoder(backend="inductor"), case.decoder()
    trees = watch(compiled), watch(eager)
    results = [decoder.generate(PROMPT, max_new_tokens=COUNT).tokens for decoder in (compiled, eager)]

    assert results[0] == results[1]
    assert len(trees[0]) == len(trees[1])
    for (_, ours), (_, theirs) in zip(*trees, strict=True):
        assert [path for path, _ in ours] == [path for path, _ in theirs]
