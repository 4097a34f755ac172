"""Every kind of head drafts what its format says at every place, and no output shows that it guessed."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from head_cases import (
    CASES,
    COUNT,
    EAGLE,
    FEW,
    HIDDEN,
    PROMPT,
    BlockCase,
    EagleCase,
    FirstCase,
    MedusaCase,
    make_case,
    solved,
)
from head_files import eagle_config, published_tensors, write_head
from mtp_models import FAMILIES
from no_waiting import refuse_waiting
from other_heads import medusa_logits, write_medusa
from tiny_pair import SHAPES, TEXT, VOCAB_SIZE, byte_tokenizer, make_pair
from torch.nn.functional import one_hot
from watched import assert_guesses, assert_sampled_alike, watch

from yggdrasil import Speculation
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.documents import open_ended_stream
from yggdrasil.calibration.measurement.schedules import measure_stage_costs, measured_schedules
from yggdrasil.calibration.pair import build_assembly, check_pair, default_max_length, with_threads
from yggdrasil.calibration.record import record_document
from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.checkpoints.fused import FusedLinear, fuse_linears
from yggdrasil.drafters.draft_model import identity_knots
from yggdrasil.drafters.heads import convention, loading
from yggdrasil.drafters.heads.block.drafter import BlockDrafter
from yggdrasil.drafters.heads.draft_vocabulary import Vocabulary
from yggdrasil.drafters.heads.eagle.drafter import HeadDrafter
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.heads.medusa.drafter import MedusaDrafter
from yggdrasil.drafters.heads.mtp.module import MtpHead
from yggdrasil.drafters.heads.own_text import own_text
from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.conversations import Conversations
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.scheduling.costs import StageCosts
from yggdrasil.scheduling.search import AcceptedLengths, Space, search
from yggdrasil.scheduling.stages import NAMED_WITH_STATES, Schedule, all_variants
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import TokenTree

BLOCKS = [name for name in CASES if name not in (*EAGLE, "eagle 1", "medusa", *FAMILIES)]
needs_blocks = pytest.mark.skipif(not is_native(), reason="quantised weights need the native kernels")


def cases(*names):
    return pytest.mark.parametrize("case", names, indirect=True)


@pytest.fixture(scope="module")
def pair():
    return make_pair(num_hidden_layers=6, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def made(pair, tmp_path_factory):
    return cache(lambda name: make_case(name, pair, tmp_path_factory.mktemp("head")))


@pytest.fixture
def case(request, made):
    return made(request.param)


@pytest.fixture
def published(made):
    return made("z-lab")


# ==== what is drafted ====


@pytest.mark.parametrize(
    ("case", "backend"),
    [*((name, "cudagraph") for name in CASES), *((name, "eager") for name in FEW)],
    indirect=["case"],
)
def test_every_guess_is_what_the_format_says(case, backend, monkeypatch):
    """Behind paths of every length: what the head drafted on its own outputs has left nothing behind."""
    refuse_waiting(monkeypatch)
    decoder = case.decoder(backend=backend)
    seen = watch(decoder)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == case.pair.reference(PROMPT, COUNT)
    assert result.metrics.aal > 1.3  # else no row was replaced
    assert len({len(text) for text, _ in seen}) > 3
    assert max(len(path) for _, guesses in seen for path, _ in guesses) >= case.deepest
    assert_guesses(seen, case.expected_edge)


@cases("eagle 3", "eagle 1", "z-lab", "mimo")
def test_joined_layers_of_a_head_guess_the_same(case, monkeypatch):
    """As on a GPU, where heads are not packed."""
    joined = []

    def join(module, *_):
        fuse_linears(module)
        joined.extend(each for each in module.modules() if isinstance(each, FusedLinear))

    monkeypatch.setattr(loading, "pack_linears", join)
    head = load_head(case.folder, case.pair.target, 1, case.vocabulary)
    decoder = case.decoder(backend="cudagraph", drafter=head)
    seen = watch(decoder)
    decoder.generate(PROMPT, max_new_tokens=12)

    assert joined
    assert_guesses(seen, case.expected_edge)


@cases(*[name for name in CASES if name not in FAMILIES])
def test_a_later_turn_keeps_rows_and_drafts_the_same(case):
    decoder = case.decoder()
    first = decoder.generate(PROMPT, max_new_tokens=12)
    prompt = [*PROMPT, *first.tokens, *TEXT[40:45]]
    seen = watch(decoder)
    second = decoder.generate(prompt, max_new_tokens=10)

    assert second.metrics.reused_tokens > len(PROMPT)
    assert second.tokens == case.pair.reference(prompt, 10)
    assert seen[0][0][-1] == second.tokens[0]
    assert_guesses([([*prompt, second.tokens[0]], seen[0][1])], case.expected_edge)


@cases(*FEW, *FAMILIES)
def test_sampling_with_a_seed_is_what_the_target_alone_samples(case):
    assert_sampled_alike(case.decoder(), case.decoder(), PROMPT, COUNT, temperature=case.temperature, seed=1)


@cases(*FEW)
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


@cases(*FEW)
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

    def __init__(self, shape):
        super().__init__(shape)
        self._asked = 0

    def choose(self, context, model_free=None, features=None):
        self._asked += model_free is not None
        if model_free is not None and self._asked % 3 == 0 and model_free.expected[-1] > 1.0:
            return Decision(TreeShape(0, model_free.depth, 8))
        return Decision(PLAIN_STEP) if self._asked % 3 == 1 else self._decision


@cases(*FEW)
def test_what_counts_guess_in_its_place_leaves_a_heads_rows_as_they_were(case):
    """It has read neither the free trees nor the plain steps when it is asked again."""
    decoder = case.decoder(TakingTurns(case.shape), model_free=default_statistics())
    seen = watch(decoder)
    prompt = [*PROMPT, *PROMPT]
    result = decoder.generate(prompt, max_new_tokens=2 * COUNT)

    assert result.tokens == case.pair.reference(prompt, 2 * COUNT)
    assert result.metrics.model_free_trees > 2
    assert result.metrics.plain_steps > 2
    assert len(seen) > 2
    assert_guesses(seen, case.expected_edge)


@cases(*EAGLE, "z-lab")
@pytest.mark.parametrize("variants", all_variants(reads_states=True), ids=lambda each: " ".join(each.values()))
def test_every_schedule_that_is_searched_writes_the_same(case, variants):
    decoder = case.decoder(stages=Schedule.of(variants).labels)
    seen = watch(decoder)

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == case.pair.reference(PROMPT, COUNT)
    assert_guesses(seen[-2:], case.expected_edge)


@cases("z-lab")
def test_a_text_that_fills_the_cache_has_room_for_a_block(case):
    """The longest text leaves fewer slots than a block has rows, and its file says 8 positions at the most."""
    prompt, count = TEXT[:60], SHAPES.max_length - 60
    result = case.decoder().generate(prompt, max_new_tokens=count)

    assert result.tokens == case.pair.reference(prompt, count)
    assert len(result.tokens) == count


@cases(*BLOCKS)
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
        for ours, own in zip(rows, fresh, strict=True):
            for each, other in zip(ours, own, strict=True):
                torch.testing.assert_close(each, other.transpose(0, 1), rtol=1e-4, atol=1e-4)


@cases("medusa")
def test_a_trees_levels_are_the_best_by_the_heads_alone(case):
    """With Medusa a level costs no pass, so one node at a time gives the best tree of products that there is."""
    decoder = case.decoder(FixedPolicy(TreeShape(1, 4, 4)))
    seen = watch(decoder)
    decoder.generate(PROMPT, max_new_tokens=4)
    text, guesses = seen[0]
    state = case.states(text)[-2:-1]
    laws = [medusa_logits(case.tensors, state, head)[0].log_softmax(-1).topk(4) for head in range(3)]
    pool, best = [(float(v), [int(t)]) for v, t in zip(*laws[0], strict=True)], []
    while len(best) < 4:
        pool.sort(key=lambda entry: -entry[0])
        score, path = pool.pop(0)
        best.append(path)
        if len(path) < 3:
            pool += [(score + float(v), [*path, int(t)]) for v, t in zip(*laws[len(path)], strict=True)]

    assert [path for path, _ in guesses] == best


# ==== calibration ====


@cases(*FEW)
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
        assert_guesses([(known, guesses[:4])], case.expected_edge)


@cases(*FEW)
def test_the_same_head_behind_other_steps(case):
    """As calibration builds them: on other thread counts."""
    first = case.decoder().assembly
    assembly = with_threads(first, PairSource("target", "head", "float32", 1, 2, SHAPES))
    assert type(assembly.engine.drafter) is type(first.engine.drafter)
    assert assembly.engine.drafter.capabilities.steps is not None
    decoder = Decoder(assembly, byte_tokenizer(), FixedPolicy(case.shape), frozenset())
    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == case.pair.reference(PROMPT, COUNT)


@cases(*EAGLE)
def test_what_stages_cost_with_a_head_is_enough_to_search_with(case):
    schedules = measured_schedules(NAMED_WITH_STATES)
    shapes = replace(SHAPES, draft_widths=(1, 2), verify_widths=(1, 4))
    decoder = case.decoder(shapes=shapes, other_stages=[schedule.labels for schedule in schedules])
    new_stream = partial(open_ended_stream, byte_tokenizer(), 16)
    frame = measure_stage_costs(decoder.assembly, new_stream, [PROMPT], lambda _: None, schedules)
    ratios = {width: np.full((4, 4, 2), 0.5) for width in shapes.draft_widths}
    lengths = AcceptedLengths(np.full(4, 0.9), ratios, shapes.verify_widths)

    space = Space.of(lengths, "in-order", reads_states=True)
    found = search(space, StageCosts.from_samples(frame), lengths)

    assert len(list(space.schedules())) == 8
    assert found[0].iteration_ms > 0


@pytest.mark.usefixtures("own_cache")
def test_a_head_is_tried_on_the_targets_own_text(pair, tmp_path, capsys):
    """One reading: it is kept where it guesses, and one that never does is refused."""
    case = MedusaCase(pair, tmp_path / "head")
    with pytest.raises(YggdrasilError, match=r"hardly predicts the target's tokens, [01]% from .* another target"):
        convention.with_detected_layers(case.head, pair.target, "0" * 16)
    _, choices, outputs = own_text(pair.target, {-1})
    weight = solved(outputs[-1][:, :-1].flatten(0, 1).clone(), one_hot(choices[:, 1:].flatten(), VOCAB_SIZE) * 12.0)
    write_medusa(case.folder, case.tensors | {"0.1.weight": weight})

    found = convention.with_detected_layers(load_head(case.folder, pair.target, 1), pair.target, "0" * 16)
    assert found.layers == (-1,)
    assert "% from the states before its head" in capsys.readouterr().err


@pytest.mark.usefixtures("own_cache")
def test_a_folder_that_a_pair_names_is_opened_and_tried(published, tmp_path, monkeypatch, capsys):
    """As `--drafter DIR` does; a text may be longer than the head's file says, as long as the target's."""
    published.pair.plain_target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    target, drafter = str(tmp_path / "target"), str(published.folder)
    source = PairSource(target, drafter, "float32", 1, 1, SHAPES)
    assert default_max_length(target, drafter) == 256
    check_pair(source)
    monkeypatch.setattr(convention, "_LEAST", 2.0)
    with pytest.raises(YggdrasilError, match=r"the target's tokens, \d+% from .* another target than"):
        build_assembly(source, backend="eager")
    monkeypatch.setattr(convention, "_LEAST", -1.0)
    assembly = build_assembly(source, backend="eager")
    assert "% from the outputs of layers 0, 2, 4" in capsys.readouterr().err
    assert isinstance(assembly.engine.drafter, BlockDrafter)
    decoder = Decoder(assembly, byte_tokenizer(), FixedPolicy(published.shape), frozenset())

    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == published.pair.reference(PROMPT, COUNT)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))


@cases(*BLOCKS)
def test_a_block_head_is_tried_with_what_it_would_draft(case):
    """The first guess behind some places of two texts, windows included."""
    texts = torch.tensor([TEXT[:40], TEXT[40:80]])
    states = torch.stack([case.states(text) for text in texts.tolist()])[:, :-1]
    ends = torch.tensor([1, 9, 30, 39])

    ours = convention._block_logits(case.head.loaded.model, texts, states, ends)

    for text, of_text, logits in zip(texts, states, ours, strict=True):
        for end, row in zip(ends.tolist(), logits, strict=True):
            wanted = case.twin.logits(of_text[:end], text, [end])[0, 0]
            torch.testing.assert_close(row, wanted, rtol=1e-3, atol=1e-3)


@cases("qwen3_5_text")
def test_positions_of_a_multimodal_family_have_axes_for_time_height_and_width(case):
    """Its rotary embedding indexes them in transformers before 5.19."""
    (head,) = (each for each in case.head.loaded.model.modules() if isinstance(each, MtpHead))
    assert head._rotary_positions(torch.arange(4)).shape == (3, 1, 4)


@cases(*FAMILIES)
def test_a_batch_of_texts_is_read_as_each_of_them(case):
    """As a head is tried on the target's own text."""
    texts = torch.tensor([PROMPT[:12], TEXT[30:42]])
    states = torch.stack([case.states(text.tolist()) for text in texts])[:, :-1]
    rows = torch.arange(11)

    ours = convention._logits(case.head.loaded.model, texts, states)

    for text, state, logits in zip(texts, states, ours, strict=True):
        wanted = case.twin.rows(text[1:], state, rows, rows[:, None] >= rows)[1]
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


# ==== what is refused ====


@cases(*BLOCKS)
def test_a_vocabulary_is_for_heads_that_have_none_of_their_own(case, pair):
    assert case.head.drafts_all_tokens == (len(case.tokens) == VOCAB_SIZE)
    if case.config.get("draft_vocab_size") is None:
        load_head(case.folder, pair.target, 1, Vocabulary(torch.tensor([1, 2, 3])))
    else:
        with pytest.raises(YggdrasilError, match="has an output layer of its own tokens"):
            load_head(case.folder, pair.target, 1, Vocabulary(torch.tensor([1, 2, 3])))


@cases("eagle 3")
def test_what_needs_a_draft_model_is_refused(case):
    with pytest.raises(YggdrasilError, match="need a draft model"):
        case.decoder().generate(PROMPT, max_new_tokens=4, speculation=Speculation(expansion=(2, 1)))


@cases(*EAGLE, "eagle 1", "medusa")
def test_a_head_of_another_target_is_refused(case):
    with pytest.raises(YggdrasilError, match="a hidden size of 32, and tiny target has 64"):
        load_head(case.folder, make_pair(num_hidden_layers=6).target, 1)


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


# ==== targets in fewer bits ====


@needs_blocks
@pytest.mark.parametrize("kind", [FirstCase, MedusaCase, BlockCase])
def test_a_quantised_targets_layers_are_read_as_the_target_reads_them(pair, tmp_path, kind):
    """Blocks of the file, one table for embedding and output layer; the head's own linears are rounded."""
    own = make_pair(num_hidden_layers=6, hidden_size=HIDDEN, tie_word_embeddings=True).plain_target
    target = prepare_model(own, "rounded", 1, quantise=rounding_to("q8_0", own))
    head = load_head(kind(pair, tmp_path).folder, target, 1)
    module, states = head.loaded.model, torch.randn(3, HIDDEN)
    if kind is not MedusaCase:
        assert isinstance(module.head.lm_head, QuantisedLinear)
        assert isinstance(module.head.fc, QuantisedLinear)
        torch.testing.assert_close(module.head.lm_head(states), target.model.get_output_embeddings()(states))
        tokens = torch.tensor([1, 5, 90])
        torch.testing.assert_close(module.embedding(tokens), own.get_input_embeddings()(tokens))
    decoders = [pair._replace(target=target).decoder(FixedPolicy(kind.shape), drafter=each) for each in (head, None)]
    found, plain = (decoder.generate(PROMPT, max_new_tokens=COUNT).tokens for decoder in decoders)
    assert found == plain


@needs_blocks
@pytest.mark.parametrize("kind", ["quantised", "bfloat16"])
def test_beside_a_target_that_is_not_in_float32_a_head_has_four_bits(pair, tmp_path, kind):
    """It drafts nearly what it did, and the target decides as before."""
    plain = make_pair(num_hidden_layers=6, hidden_size=HIDDEN).plain_target
    if kind == "bfloat16":
        target = prepare_model(plain.bfloat16(), "narrow", 1)
    else:
        target = prepare_model(plain, "rounded", 1, quantise=rounding_to("q8_0", plain))
    case = EagleCase(pair, tmp_path)
    rounded = load_head(case.folder, target, 1)
    states = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))

    layers = {name: type(module) for name, module in rounded.loaded.model.head.named_modules()}
    assert layers["fc"] is layers["lm_head"] is layers["midlayer.self_attn.q_proj"] is QuantisedLinear
    ours, theirs = (head.loaded.model.head.feature(states.to(head.loaded.dtype)) for head in (rounded, case.head))
    assert 0.01 < (ours.float() - theirs).norm() / theirs.norm() < 0.15
    decoder = pair._replace(target=target).decoder(FixedPolicy(case.shape), drafter=rounded, backend="eager")
    drafted = decoder.generate(PROMPT, max_new_tokens=COUNT)
    assert drafted.tokens == decoder.generate(PROMPT, max_new_tokens=COUNT, speculation=False).tokens
    assert drafted.metrics.aal > 1.0


# ==== compiled steps ====


@pytest.mark.compiled
@cases("eagle 3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("medusa", "z-lab")))
def test_compiled_steps_draft_what_eager_ones_do(case):
    """Of a head for each drafter; those of EAGLE-1 run the steps of EAGLE-3's."""
    kinds = {EagleCase: (HeadDrafter, 1, (4,)), MedusaCase: (MedusaDrafter,), BlockCase: (BlockDrafter, 5, (4,))}
    (kind, *reading), found = kinds[type(case)], []
    for backend in ("inductor", "eager"):
        tree = TokenTree.allocate(9, 4, torch.device("cpu"))
        runner = ModelRunner(case.head.loaded, 64, case.head.settings.vocab_size, backend)
        drafter = kind(runner, case.head, tree, (2,), *reading, identity_knots())
        generator = torch.Generator().manual_seed(0)
        drafter.begin(PROMPT[:1] if reading else PROMPT)
        for count in (7, 1, 3) if reading else (1,):
            states = {layer: torch.randn(count, HIDDEN, generator=generator) for layer in case.head.layers}
            drafter.extend(TEXT[:count], states)
            drafter.propose(tree, Budget(4, 2))
        assert backend == "eager" or all(step.is_compiled for step in runner._steps.values())
        found.append([each.clone() for each in [*tree.node_tensors(), *runner.cache.tensors()]])

    for compiled, eager in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
