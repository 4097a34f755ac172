"""Every kind of drafter on every family of targets: small random models, drafters that know much of their text.

A drafter is tried in trees of all shapes, another in every iteration: the tokens must be those of transformers'
``generate``, and sampled ones those of plain decoding with the same seed, in a first and in a later turn.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from drafters.example_drafter import LastFollowerDrafter
from head_cases import PROMPT, HeadCase, make_case
from mixtures import mixture_model
from mtp_models import FAMILIES as MTP_FAMILIES
from mtp_models import tiny_target
from recurrent_models import RECURRENT, SHAPES, recurrent_model
from tiny import FAMILIES as OTHERS
from tiny_pair import TEXT, VOCAB_SIZE, TinyPair, random_model

from yggdrasil import SamplingParams, Speculation
from yggdrasil.drafters import Budget, Capabilities, Step
from yggdrasil.drafters.model_free_options import NGramOptions
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import Drafter
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter, default_statistics
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.engine.decoder import Decoder
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.native_steps.description import describe
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.token_tree import TokenTree

COUNT, LATER = 28, 12  # tokens of a first and of a later turn
SEED, TEMPERATURES = 5, (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
TREES = (TreeShape(1, 4, 4), TreeShape(2, 3, 8), TreeShape(4, 4, 16), TreeShape(1, 1, 1), TreeShape(4, 2, 4),
         TreeShape(2, 4, 16), TreeShape(1, 2, 4))  # fmt: skip


class ChangingPolicy(FixedPolicy):
    """Another tree in every iteration, and now and then a plain step.

    Without a drafter all trees are of model-free drafts alone, beside one each third.
    """

    def __init__(self, *, with_drafter: bool, wants_model_free: bool) -> None:
        super().__init__(PLAIN_STEP)
        self.wants_model_free, self._with_drafter = wants_model_free, with_drafter

    def begin(self) -> None:
        self._shapes = cycle((*TREES, PLAIN_STEP))
        self._iteration = 0

    def choose(self, context, model_free=None, features=None):
        shape = next(self._shapes)
        self._iteration += 1
        if self.wants_model_free and (not self._with_drafter or self._iteration % 3 == 0):
            width = shape.verify_width if shape.verify_width > 1 else 4
            shape = PLAIN_STEP if model_free is None else TreeShape(0, model_free.depth, width)
        elif not self._with_drafter:
            shape = PLAIN_STEP
        self._decision = Decision(shape, is_drafting=shape.depth > 0 and shape.width > 0)
        return self._decision


class StateReader:
    """A user's drafter that gets states of the target, knows the text, and goes wrong now and then."""

    name, capabilities = "state reader", Capabilities(layers=(0, -1))

    def __init__(self, text: Sequence[int]) -> None:
        self._text = wrong_now_and_then(text)

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)

    def extend(self, tokens: Sequence[int], states: Mapping[int, torch.Tensor]) -> None:
        assert {layer: len(rows) for layer, rows in states.items()} == dict.fromkeys((0, -1), len(tokens))
        self._length += len(tokens)

    def cost(self, budget: Budget) -> list[Step]:
        return [Step("own", budget.width or 1)]

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        node = 0
        for token in self._text[self._length : self._length + budget.depth]:
            for other in range(1, budget.width):
                tree.attach(node, (token + other) % VOCAB_SIZE, -2.0)
            node = tree.attach(node, token, -0.1)


# ==== families ====

# Of the targets with MTP modules, ERNIE-4.5's repeats one token.
FAMILIES = tuple(dict.fromkeys((*RECURRENT, *OTHERS, "mimo", "glm4_moe")))


@cache
def pair_of(family: str) -> TinyPair:
    """A small random model of the family with an untouched copy."""
    if family in RECURRENT or family in OTHERS:
        model = (recurrent_model if family in RECURRENT else mixture_model)(family)
        return TinyPair(model.loaded, None, model.plain, None)
    model = tiny_target(family)
    return TinyPair(prepare_model(copy.deepcopy(model), family, 1), None, model, None)


def mtp_family(family: str) -> str | None:
    """The name of a target with an MTP module for ``family``; None if no such module is published."""
    return next((name for name in MTP_FAMILIES if name in (family, f"{family}_text")), None)


class Given(NamedTuple):
    """What a drafter is made for: a family, or one with an MTP module, and a folder for files."""

    family: str
    folder: Path
    is_mtp: bool

    @property
    def pair(self) -> TinyPair:
        return head_case("mtp", self).pair if self.is_mtp else pair_of(self.family)

    @property
    def text(self) -> list[int]:
        return [*PROMPT, *self.pair.reference(PROMPT, COUNT + 12)]


# ==== drafters ====


class Kind(NamedTuple):
    """One kind of drafter: ``make`` returns the arguments ``drafter`` and ``model_free`` of a decoder."""

    make: Callable[[Given], dict[str, Any]]
    speculation: Speculation | None = None


def free(make: Callable[[list[int]], Drafter]) -> Kind:
    return Kind(lambda given: {"drafter": None, "model_free": make(given.text)})


def with_table(text: list[int]) -> Drafter:
    return StatisticsDrafter(NGramScorer.default(with_table=True), Table.of([(PROMPT, wrong_now_and_then(text))]))


def wrong_now_and_then(text: Sequence[int]) -> list[int]:
    return [token if place % 7 else (token + 1) % 90 for place, token in enumerate(text)]


@cache
def draft_model(given: Given) -> LoadedModel:
    """A small Llama that was taught the text, a wrong token now and then."""
    model = random_model(3, hidden_size=32, intermediate_size=48)
    text, labels = torch.tensor([given.text]), torch.tensor([wrong_now_and_then(given.text)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(text, labels=labels).loss.backward()
        optimizer.step()
    return prepare_model(model.eval(), "taught", 1)


@cache
def head_case(name: str, given: Given) -> HeadCase:
    folder = given.folder / f"{given.family} {name}"
    return make_case(mtp_family(given.family), None, folder) if name == "mtp" else make_case(name, given.pair, folder)


def beside_text(make: Callable[[Given], dict[str, Any]]) -> Kind:
    """With n-gram statistics of the text in the same trees."""
    return Kind(lambda given: {**make(given), "model_free": default_statistics()})


def of_model(given: Given) -> dict[str, Any]:
    return {"drafter": draft_model(given)}


def of_head(name: str) -> Callable[[Given], dict[str, Any]]:
    return lambda given: {"drafter": head_case(name, given).head}


# One a format: the variants of a format differ in the head alone (tests/drafters/heads/test_drafting.py).
HEADS = ("eagle 3", "eagle 1", "medusa", "z-lab", "jetspec", "dflash 2", "dspark gated")
NEWEST = NGramOptions(is_use_oldest=False, max_draft_len=3)
LONGEST = NGramOptions(is_keep_all=False, max_matching_ngram_size=1, is_public_pool=True)
KINDS = {
    "text": free(lambda text: default_statistics()),
    "table": free(with_table),
    "ngram": free(lambda text: NGramDrafter()),
    "ngram, newest": free(lambda text: NGramDrafter(NEWEST)),
    "ngram, longest": free(lambda text: NGramDrafter(LONGEST)),
    "own": free(lambda text: LastFollowerDrafter()),
    "own, of states": Kind(lambda given: {"drafter": StateReader(given.text)}),
    "draft model": Kind(of_model),
    "draft model, k-ary": Kind(of_model, Speculation(expansion=(2, 2, 1))),
    "draft model + text": beside_text(of_model),
    **{name: Kind(of_head(name)) for name in HEADS},
    "eagle 1 + text": beside_text(of_head("eagle 1")),
    "mtp": Kind(of_head("mtp")),
    "mtp + text": beside_text(of_head("mtp")),
}


def kinds_of(family: str) -> list[str]:
    """The drafters that there can be for a family."""
    return [kind for kind in KINDS if not kind.startswith("mtp") or mtp_family(family)]


# ==== a cell of the table ====


class Outcome(NamedTuple):
    """Tokens an iteration of greedy and of sampled decoding; a fault if tokens differ."""

    greedy: float
    drawn: float
    fault: str = ""


def drawn_text(pair: TinyPair, plain: Decoder) -> tuple[SamplingParams, list[int]]:
    """Sampled tokens of plain decoding that part from the greedy ones only after some: drafters know these alone."""
    greedy = pair.reference(PROMPT, COUNT)
    for temperature in TEMPERATURES:
        sampling = SamplingParams(temperature=temperature, seed=SEED)
        if plain.generate(PROMPT, max_new_tokens=COUNT // 2, sampling=sampling).tokens == greedy[: COUNT // 2]:
            break
    return sampling, plain.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling).tokens


def check(family: str, kind: str, folder: Path, backend: str = "") -> Outcome:
    """Decode with one kind of drafter for one family.

    ``backend`` "" is native steps where the family has them, else the eager ones.

    Raises:
        YggdrasilError: the family or the drafter is refused.
    """
    given = Given(family, folder, kind.startswith("mtp"))
    pair, options = given.pair, KINDS[kind].make(given)
    assert len({*pair.reference(PROMPT, COUNT)}) > 6, "whatever was read, such a text would follow"
    policy = ChangingPolicy(
        with_drafter=options["drafter"] is not None, wants_model_free=options.get("model_free") is not None
    )
    backend = backend or ("eager" if describe(pair.target.config) is None else "native")
    decoder = pair.decoder(policy, SHAPES, **options, backend=backend)
    if hasattr(options.get("model_free"), "is_public_pool"):
        decoder.pool_texts()  # the later requests draft from the text of the first
    plain = pair.decoder(PLAIN_POLICY, SHAPES, drafter=None, backend=backend)
    speculation = {"speculation": KINDS[kind].speculation} if KINDS[kind].speculation else {}
    first = decoder.generate(PROMPT, max_new_tokens=COUNT, **speculation)
    later = [*PROMPT, *first.tokens, *TEXT[40:45]]
    second = decoder.generate(later, max_new_tokens=LATER, **speculation)
    sampling, sampled = drawn_text(pair, plain)
    drawn = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, **speculation)
    expected = {
        "greedy": (first, pair.reference(PROMPT, COUNT)),
        "of a later turn": (second, pair.reference(later, LATER)),
        "sampled": (drawn, sampled),
    }
    faults = [f"{name} tokens differ" for name, (found, tokens) in expected.items() if found.tokens != tokens]
    # A user's drafter that reads states reads those of the whole prompt.
    if second.metrics.reused_tokens < len(PROMPT) and not isinstance(options["drafter"], StateReader):
        faults.append("the later turn reads the first again")
    return Outcome(first.metrics.aal, drawn.metrics.aal, ", ".join(faults))
