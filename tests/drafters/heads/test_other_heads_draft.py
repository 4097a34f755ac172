"""Heads of EAGLE-1 and Medusa draft what their formats say at every place, and no output shows that they guessed."""

import pytest
import torch
from head_files import write_head
from no_waiting import refuse_waiting
from other_heads import (
    FirstReference,
    first_config,
    first_shapes,
    medusa_logits,
    medusa_shapes,
    random_tensors,
    write_medusa,
)
from tiny_pair import TEXT, VOCAB_SIZE, make_pair
from watched import assert_guesses, assert_sampled_alike, watch

from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.pair import sibling, with_threads
from yggdrasil.calibration.record import record_document
from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.drafters.draft_model import identity_knots
from yggdrasil.drafters.heads import convention
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.heads.medusa.drafter import MedusaDrafter
from yggdrasil.drafters.heads.own_text import own_text
from yggdrasil.drafters.protocol import Budget
from yggdrasil.engine.conversations import Conversations
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.token_tree import TokenTree

PROMPT = TEXT[:21]
COUNT = 24
HIDDEN = 32
TREE = FixedPolicy(TreeShape(2, 4, 8))
NUM_HEADS = 3


@pytest.fixture(scope="module")
def pair():
    return make_pair(num_hidden_layers=2, hidden_size=HIDDEN)


@torch.no_grad()
def hidden_states_of(pair, text):
    """What the target's head reads at every position."""
    return pair.plain_target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states[-1][0]


class FirstCase:
    """An EAGLE-1 head that knows the text to come by heart, but for what its layer adds at random."""

    def __init__(self, pair, folder):
        self.pair = pair
        model, config = pair.plain_target, first_config(VOCAB_SIZE, rms_norm_eps=1e-5)
        table, output = (each.weight.detach() for each in (model.get_input_embeddings(), model.get_output_embeddings()))
        text = torch.tensor([*PROMPT, *pair.reference(PROMPT, COUNT + 8)])
        states = hidden_states_of(pair, text.tolist())
        tensors = random_tensors(first_shapes(config), scale=0.02)
        rows = torch.cat([table[text[1:]], states[:-1], torch.ones(len(text) - 1, 1)], dim=-1)
        fitted = torch.linalg.lstsq(rows, states[1:], driver="gelsd").solution
        tensors |= {"fc.weight": fitted[:-1].T.contiguous(), "fc.bias": fitted[-1].contiguous()}
        self.folder = folder
        write_head(folder, config, tensors)
        self.twin = FirstReference(config, tensors, table, output)

    def expected_edge(self, text, path):
        features, tokens = hidden_states_of(self.pair, text)[:-1], torch.tensor([*text[1:], *path])
        for length in range(len(text) - 1, len(text) - 1 + len(path)):
            rows = torch.arange(length)
            outputs, logits = self.twin.rows(tokens[:length], features, rows, rows[:, None] >= rows)
            features = torch.cat([features, outputs[-1:]])
        return logits[-1].log_softmax(-1)[path[-1]]


class MedusaCase:
    """Heads that know much of the text to come."""

    def __init__(self, pair, folder):
        self.pair = pair
        text = [*PROMPT, *pair.reference(PROMPT, COUNT + 8)]
        states = hidden_states_of(pair, text)
        self.tensors = random_tensors(medusa_shapes(HIDDEN, VOCAB_SIZE, NUM_HEADS), scale=0.02)
        for head in range(NUM_HEADS):
            wanted = torch.nn.functional.one_hot(torch.tensor(text[2 + head :]), VOCAB_SIZE) * 12.0
            fitted = torch.linalg.lstsq(states[: len(wanted)], wanted, driver="gelsd").solution
            self.tensors[f"{head}.1.weight"] = fitted.T.contiguous()
        self.folder = write_medusa(folder, self.tensors)

    def expected_edge(self, text, path):
        state = hidden_states_of(self.pair, text)[-2:-1]
        return medusa_logits(self.tensors, state, len(path) - 1)[0].log_softmax(-1)[path[-1]]


@pytest.fixture(scope="module", params=[FirstCase, MedusaCase], ids=["eagle 1", "medusa"])
def case(request, pair, tmp_path_factory):
    case = request.param(pair, tmp_path_factory.mktemp("head"))
    case.head = load_head(case.folder, pair.target, 1)
    case.decoder = lambda **options: pair.decoder(TREE, drafter=case.head, **options)
    return case


@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_every_guess_is_what_the_format_says(case, backend, monkeypatch):
    refuse_waiting(monkeypatch)
    decoder = case.decoder(backend=backend)
    seen = watch(decoder)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == case.pair.reference(PROMPT, COUNT)
    assert result.metrics.aal > 1.3
    assert max(len(path) for _, guesses in seen for path, _ in guesses) > 2
    assert_guesses(seen, case.expected_edge)


def test_a_later_turn_drafts_as_a_fresh_one(case):
    decoder = case.decoder()
    first = decoder.generate(PROMPT, max_new_tokens=12)
    prompt = [*PROMPT, *first.tokens, *TEXT[40:45]]
    seen = watch(decoder)
    second = decoder.generate(prompt, max_new_tokens=10)

    assert second.metrics.reused_tokens > len(PROMPT)
    assert second.tokens == case.pair.reference(prompt, 10)
    text, guesses = seen[0]
    assert text[-1] == second.tokens[0]
    assert_guesses([([*prompt, second.tokens[0]], guesses)], case.expected_edge)


def test_sampling_with_a_seed_is_what_the_target_alone_samples(case):
    assert_sampled_alike(case.decoder(), case.decoder(), PROMPT, COUNT, temperature=40.0, seed=1)


def test_recorded_trees_are_those_of_decoding(case):
    decoder = case.decoder()
    seen = watch(decoder)
    generated = case.pair.reference(PROMPT, 9)
    record_document(decoder.assembly, decoder.assembly.engine.drafter, PROMPT, generated, 0)

    assert seen
    for known, guesses in seen:
        assert known == [*PROMPT, *generated][: len(known)]
        for path, edge in guesses[:4]:
            assert edge == pytest.approx(float(case.expected_edge(known, path)), abs=2e-3)


def test_the_same_head_behind_other_steps(case):
    source = PairSource("target", "head", "float32", 1, 2, case.decoder().assembly.shapes)
    first = case.decoder().assembly
    for assembly in (with_threads(first, source), sibling(first)):
        assert assembly.engine.drafter.capabilities.steps is not None
        decoder = Decoder(assembly, case.decoder().tokenizer, TREE, frozenset())
        assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == case.pair.reference(PROMPT, COUNT)


def test_conversations_in_turns(case):
    decoder = case.decoder()
    kept = Conversations(decoder.assembly, 1 << 20)
    for prompt in (PROMPT, TEXT[30:60], PROMPT):
        kept.switch_to(prompt)
        assert decoder.generate(prompt, max_new_tokens=8).tokens == case.pair.reference(prompt, 8)
    assert len(kept)


def test_trying_a_head_on_the_targets_own_text(pair, tmp_path, monkeypatch, capsys):
    """One reading: it is kept where it guesses, and one that never does is refused."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    case = MedusaCase(pair, tmp_path / "head")
    with pytest.raises(YggdrasilError, match=r"guesses [01]% of its choices from .* another target than tiny"):
        convention.with_detected_layers(load_head(case.folder, pair.target, 1), pair.target, "0" * 16)
    _, choices, outputs = own_text(pair.target, {-1})
    wanted = torch.nn.functional.one_hot(choices[:, 1:].flatten(), VOCAB_SIZE) * 12.0
    fitted = torch.linalg.lstsq(outputs[-1][:, :-1].flatten(0, 1).clone(), wanted, driver="gelsd").solution
    write_medusa(case.folder, case.tensors | {"0.1.weight": fitted.T.contiguous()})

    assert convention.with_detected_layers(load_head(case.folder, pair.target, 1), pair.target, "0" * 16).layers == (
        -1,
    )
    assert "of its choices from the states before its head" in capsys.readouterr().err


def test_a_head_of_another_target_is_refused(case):
    with pytest.raises(YggdrasilError, match="a hidden size of 32, and tiny target has 64"):
        load_head(case.folder, make_pair().target, 1)


def test_a_trees_levels_are_the_best_by_the_heads_alone(pair, tmp_path):
    """With Medusa a level costs no pass, so one node at a time gives the best tree of products that there is."""
    case = MedusaCase(pair, tmp_path)
    decoder = pair.decoder(FixedPolicy(TreeShape(1, 4, 4)), drafter=load_head(tmp_path, pair.target, 1))
    seen = watch(decoder)
    decoder.generate(PROMPT, max_new_tokens=4)
    text, guesses = seen[0]
    state = hidden_states_of(pair, text)[-2:-1]
    laws = [medusa_logits(case.tensors, state, head)[0].log_softmax(-1).topk(4) for head in range(NUM_HEADS)]
    pool, best = [(float(v), [int(t)]) for v, t in zip(*laws[0], strict=True)], []
    while len(best) < 4:
        pool.sort(key=lambda entry: -entry[0])
        score, path = pool.pop(0)
        best.append(path)
        if len(path) < NUM_HEADS:
            pool += [(score + float(v), [*path, int(t)]) for v, t in zip(*laws[len(path)], strict=True)]

    assert [path for path, _ in guesses] == best


@pytest.mark.parametrize("kind", [FirstCase, MedusaCase])
def test_a_quantised_targets_output_layer_is_read_as_the_target_reads_it(pair, tmp_path, kind):
    """Blocks of the file, one table for embedding and output layer."""
    from yggdrasil.checkpoints.formats.rounding import rounding_to
    from yggdrasil.native import is_native

    if not is_native():
        pytest.skip("needs the native kernels")
    own = make_pair(num_hidden_layers=2, hidden_size=HIDDEN, tie_word_embeddings=True)
    target = prepare_model(own.plain_target, "rounded", 1, quantise=rounding_to("q8_0", own.plain_target))
    head = load_head(kind(pair, tmp_path).folder, target, 1)
    if kind is FirstCase:
        assert isinstance(head.loaded.model.head.lm_head, QuantisedLinear)
        states = torch.randn(3, HIDDEN)
        wanted = target.model.get_output_embeddings()(states)
        torch.testing.assert_close(head.loaded.model.head.logits(states), wanted)


@pytest.mark.compiled
@pytest.mark.slow
def test_compiled_steps_grow_the_same_trees(pair, tmp_path):
    """Of Medusa's heads; those of EAGLE-1 run the steps of EAGLE-3's."""
    MedusaCase(pair, tmp_path)
    head, grown = load_head(tmp_path, pair.target, 1), []
    for backend in ("inductor", "eager"):
        tree = TokenTree.allocate(9, 4, torch.device("cpu"))
        runner = ModelRunner(head.loaded, 1, VOCAB_SIZE, backend)
        drafter = MedusaDrafter(runner, head, tree, (2,), identity_knots())
        drafter.begin(PROMPT)
        drafter.extend([5], {-1: torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0))})
        drafter.propose(tree, Budget(4, 2))
        grown.append([buffer.clone() for buffer in tree.node_tensors()])

    for compiled, eager in zip(*grown, strict=True):
        torch.testing.assert_close(compiled, eager)
