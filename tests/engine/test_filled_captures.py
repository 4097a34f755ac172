"""Trees of a drafter that n-gram statistics extend, on captured steps: the trees of a CPU, by one wait."""

from functools import cache

import head_cases
import pytest
from no_waiting import refuse_waiting
from test_captured import count_calls
from test_engine import PROMPT
from tiny_pair import make_pair

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.scheduling.stages import DEFAULT_ORDER, Schedule
from yggdrasil.tree.host_tree import HostTree
from yggdrasil.tree.shape import TreeShape

NUM_TOKENS = 24
SHAPE = TreeShape(2, 3, 16)


class Filled(FixedPolicy):
    """One shape, whose tree n-gram statistics extend."""

    wants_model_free = True


class Restless(Filled):
    """Shapes that change with the length of the text, so that many drafts made ahead are of the wrong shape."""

    SHAPES = (SHAPE, TreeShape(4, 2, 8), SHAPE, TreeShape(1, 4, 16), TreeShape(0, 0, 1))

    def choose(self, context, model_free=None, features=None):
        shape = self.SHAPES[context % len(self.SHAPES)]
        return Decision(shape, is_drafting=shape.depth > 0)

    def prune(self, decision, expected, context):
        return decision


@pytest.fixture(scope="module")
def pair():
    return make_pair(noise=0.02)


def decode(pair, backend, policy, prompt=PROMPT, count=NUM_TOKENS, stages=DEFAULT_ORDER, free=None, **options):
    """The decoder, its answer and the trees that it verified."""
    free = default_statistics() if free is None else free
    decoder = pair.decoder(policy, backend=backend, stages=stages, model_free=free)
    trees = []
    answer = decoder.generate(prompt, max_new_tokens=count, watch=trees.append, **options)
    return decoder, answer, trees


def assert_same_trees(ours, theirs):
    """One more where the books are kept late: of a pass behind the end of the text."""
    assert len(ours) - len(theirs) in (0, 1)
    for mine, other in zip(ours, theirs, strict=False):
        assert (mine.tokens, mine.parents, mine.accepted) == (other.tokens, other.parents, other.accepted)
        assert mine.drafter == other.drafter


REQUESTS = {
    "greedy": {},
    "sampled": {"sampling": SamplingParams(temperature=5.0, seed=2)},
    "drawn among few": {"sampling": SamplingParams(temperature=6.0, top_k=9, presence_penalty=1.0, seed=4)},
}
LATE = {"depth_prediction": "late", "bookkeeping": "overlapped"}
CASES = [
    ("greedy", Filled, {}),
    ("sampled", Filled, LATE),
    ("sampled", Restless, {}),
    ("greedy", Restless, LATE),
    ("drawn among few", Filled, {}),
]


@pytest.mark.parametrize(("name", "policy", "variants"), CASES)
def test_trees_are_those_of_a_cpu(pair, name, policy, variants):
    options, stages = REQUESTS[name], Schedule.of(variants).labels
    prompt = [*PROMPT, *PROMPT[:5]]  # repeats itself, so that statistics find continuations
    _, expected, theirs = decode(pair, "native", policy(SHAPE), prompt, stages=stages, **options)
    decoder, answer, ours = decode(pair, "cudagraph", policy(SHAPE), prompt, stages=stages, **options)

    assert answer.tokens == expected.tokens
    assert_same_trees(ours, theirs)
    assert any(tree.drafted < max(tree.verified) for tree in ours)
    again = decoder.generate(prompt, max_new_tokens=8, **options)
    assert again.tokens == expected.tokens[:8]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    behind = make_pair(num_hidden_layers=6, hidden_size=head_cases.HIDDEN)
    return cache(lambda name: head_cases.make_case(name, behind, tmp_path_factory.mktemp("head")))


HEADS = (*head_cases.FEW, "dspark rnn", "mimo")


ROWS_AHEAD = ("eagle 3", "z-lab")  # a head that reads each drafted token, and one that reads none


@pytest.mark.parametrize(
    ("name", "request_name", "policy", "variants"),
    [*((name, *CASES[3]) for name in HEADS), *((name, *case) for name in ROWS_AHEAD for case in CASES[1:3])],
)
def test_trees_of_a_head_are_those_of_a_cpu(made, name, request_name, policy, variants):
    """Hidden states of accepted rows are read on the device, and in the queue where drafts made ahead are not used."""
    case, stages = made(name), Schedule.of(variants).labels
    options = REQUESTS[request_name]
    prompt = [*head_cases.PROMPT[:6], *head_cases.PROMPT]
    _, expected, theirs = decode(case, "native", policy(SHAPE), prompt, stages=stages, **options)
    decoder, answer, ours = decode(case, "cudagraph", policy(SHAPE), prompt, stages=stages, **options)

    assert answer.tokens == expected.tokens
    assert_same_trees(ours, theirs)
    assert any(tree.drafted < max(tree.verified) for tree in ours)
    again = decoder.generate([*prompt, *answer.tokens[:9]], max_new_tokens=12, **options)
    fresh = case.decoder(policy(SHAPE), backend="native").generate(
        [*prompt, *answer.tokens[:9]], max_new_tokens=12, **options
    )
    assert again.metrics.reused_tokens > len(prompt)
    assert again.tokens == fresh.tokens


@pytest.mark.parametrize("name", ["z-lab", "dspark rnn"])
def test_a_block_head_reads_and_drafts_by_one_launch(made, name, monkeypatch):
    """Where its drafts are not launched behind the pass."""
    calls = count_calls(monkeypatch)
    stages = Schedule.of({"depth_prediction": "informed"}).labels
    decoder = made(name).decoder(FixedPolicy(SHAPE), backend="cudagraph", stages=stages)
    decoder.assembly.complete()
    recorded = decoder.assembly.target.recorder.num_recorded
    calls.clear()
    decoder.generate(head_cases.PROMPT, max_new_tokens=2)
    num_reading = calls["Capture"]  # of the prompt, and an iteration
    decoder.assembly.forget()
    calls.clear()
    iterations = decoder.generate(head_cases.PROMPT, max_new_tokens=NUM_TOKENS).metrics.iterations

    assert iterations > num_reading
    assert calls["Capture"] <= 3 * iterations + num_reading  # head, levels, pass
    assert decoder.assembly.target.recorder.num_recorded == recorded


@pytest.mark.parametrize("name", ["model", *(name for name in HEADS if name != "eagle 3 of speculators")])
def test_an_iteration_waits_once(request, name, monkeypatch):
    refuse_waiting(monkeypatch)
    calls = count_calls(monkeypatch)
    fetched = []
    fetch = HostTree.fetch
    monkeypatch.setattr(HostTree, "fetch", lambda self: (fetched.append(self), fetch(self)))
    source = request.getfixturevalue("pair") if name == "model" else request.getfixturevalue("made")(name)
    decoder = source.decoder(Filled(SHAPE), backend="cudagraph", model_free=default_statistics())
    decoder.assembly.complete()
    calls.clear()
    decoder.generate(PROMPT, max_new_tokens=2)
    num_reading = calls["Capture"]  # of the prompt by both models, and an iteration
    decoder.assembly.forget()
    calls.clear()
    fetched.clear()
    trees = []
    generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, watch=trees.append)
    iterations = generation.metrics.iterations
    num_long = sum(len(tree.accepted) > decoder.assembly.engine.drafter.most_read for tree in trees)

    assert iterations > 5
    assert len(fetched) <= 1 + num_long < iterations - 2  # behind the prompt, and more tokens than a head draft reads
    assert calls["Readback"] <= iterations + 3
    assert calls["Capture"] <= 3 * iterations + num_reading + 2 * len(fetched)
