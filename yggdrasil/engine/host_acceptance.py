"""Prepares requests whose tokens the host chooses and accepts from logits: their engine, policy, sampler and rule."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary, ref

from yggdrasil.acceptance.coins import SeededCoins, fresh_seed
from yggdrasil.acceptance.drawn import DrawnTree
from yggdrasil.acceptance.grammar import Grammar, GrammarCompiler
from yggdrasil.acceptance.processors import Processors, build_processors, check_bias, tokenize_bad_words
from yggdrasil.acceptance.rules import DRAWN_KINDS, Counts, MatchRule, make_rule
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation, starts_thinking, thinking_marks
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.drafters.expansion import ExpansionDrafter
from yggdrasil.drafters.grammar import GrammarDrafter
from yggdrasil.drafters.protocol import Drafter, DrafterGroup
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.engine import Engine
from yggdrasil.engine.targets.logit_target import AcceptanceSetup, LogitTarget
from yggdrasil.engine.trace import DecodingReport
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy, Policy
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.scheduling.stages import DEFAULT_ORDER, HEAD_FIRST_ORDER, is_head_first
from yggdrasil.tree.shape import TreeShape

_CHAIN, _TREE = (1, 1, 1, 1), (2, 1, 1)  # default expansions of sampled drafts, in draws per node by level


def fitting_expansion(expansion: tuple[int, ...], shapes: Shapes, width: int | None = None) -> tuple[int, ...]:
    """Return the leading entries of ``expansion`` whose tree, root included, fits in one pass; at least one entry.

    Args:
        expansion: entry i is the number of children of each node at depth i, as in SpecInfer.
        shapes: limits of nodes and depth.
        width: rows of the pass; None takes the widest verify width of ``shapes``.
    """
    capacity = min(width or shapes.verify_widths[-1], shapes.num_nodes)
    sizes = accumulate(accumulate(expansion[: shapes.max_depth], mul), initial=1)  # nodes per level
    return expansion[: max(1, sum(size <= capacity for size in sizes) - 1)]


@dataclass(frozen=True)
class PreparedRequest:
    """The engine, policy, sampler and report of one request, ready to run."""

    engine: Engine
    policy: Policy
    report: DecodingReport
    sampler: Sampler | None = None
    decision: AcceptanceSetup | None = None  # of the host's acceptance; None if the device accepts
    counts: Counts | None = None  # of near ties; None if the request does not look for near ties
    is_planned: bool = False  # whether the decoder's own policy chooses the trees
    set_up: Callable[[], None] | None = None  # called when the request begins
    follow_draws: Callable[[], None] | None = None  # called after ``set_up``: gives drafters the target's seed

    def begin(self) -> None:
        """Set up the target and the drafters for this request. Call it just before the request runs.

        Other requests may have been prepared in the meantime, so this is not done earlier.
        """
        if self.decision is not None:
            assert isinstance(self.engine.target, LogitTarget)
            self.engine.target.begin(self.decision)
        for call in (self.set_up, self.follow_draws):
            if call is not None:
                call()

    def final_report(self) -> DecodingReport:
        """Return how the request was decoded, with the near ties, width-1 passes and flips (changed tokens) so far."""
        if self.counts is None:
            return self.report
        counts = self.counts
        return replace(
            self.report, near_ties=counts.near_ties, width_one_passes=counts.width_one_passes, flips=counts.flips
        )


class SamplerFactory:
    """Factory of the samplers of one decoder's requests. ``eos`` has the ids of the model's end tokens."""

    def __init__(self, assembly: Assembly, tokenizer: Tokenizer, eos: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self._assembly, self._eos = assembly, eos
        self._vocab_size = assembly.target.call.vocab_size

    def full(self, prompt: Sequence[int], sampling: SamplingParams, seed: int, eos: frozenset[int]) -> Sampler:
        """Return a sampler that chooses a request's tokens from logits on the host, with all logits processors.

        Args:
            prompt: token ids.
            sampling: the request's parameters, without its seed.
            seed: seed of the random draws.
            eos: ids of the request's end tokens; empty with ``ignore_eos``.

        Raises:
            YggdrasilError: parameters do not fit the vocabulary, or the constraint is invalid.
        """
        check_bias(sampling, self._vocab_size)
        bad_words = tokenize_bad_words(sampling.bad_words, self.tokenizer, self._vocab_size)
        return self._sampler(prompt, sampling, seed, eos, build_processors(sampling, len(prompt), eos, bad_words))

    def recording(self, prompt: Sequence[int], sampling: SamplingParams, eos: frozenset[int]) -> Sampler | None:
        """Return a sampler that chooses nothing, for a request whose tokens are chosen on the device.

        It receives each committed token, keeps the log-probabilities, and tracks which tokens the request's constraint
        and bad words allow next. The result is None if the request has no ``logprobs``, no constraint and no bad words.

        Args:
            prompt: token ids.
            sampling: the request's parameters; its ``logit_bias`` is checked in any case.
            eos: ids of the request's end tokens; empty with ``ignore_eos``.

        Raises:
            YggdrasilError: ``logit_bias`` has a token outside the vocabulary, or the constraint is invalid.
        """
        check_bias(sampling, self._vocab_size)
        words = tokenize_bad_words(sampling.bad_words, self.tokenizer, self._vocab_size)
        words = [
            word for word in words if len(word) > 1 or word[0] not in eos
        ]  # as in transformers: the end is allowed
        if sampling.logprobs is None and sampling.constraint is None and not words:
            return None
        return self._sampler(prompt, sampling, 0, eos, Processors([], []), words)

    def thinking_marks(self, speculation: Speculation) -> tuple[int, int] | None:
        """Return the begin and end token of the section to which ``speculation`` limits the rule ``relaxed``, if any.

        Raises:
            YggdrasilError: the tokenizer has no such tokens.
        """
        return thinking_marks(speculation, self.tokenizer.get_vocab() if speculation.thinking_only else {})

    def _sampler(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        eos: frozenset[int],
        processors: Processors,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> Sampler:
        engine = self._assembly.engine
        capacity = engine.max_length + engine.tree.num_nodes + 1
        grammar = self._grammar(sampling, eos)
        coins = SeededCoins(seed)
        return Sampler(sampling, prompt, processors, coins, capacity, eos=eos, grammar=grammar, bad_words=bad_words)

    def _grammar(self, sampling: SamplingParams, eos: frozenset[int]) -> Grammar | None:
        if sampling.constraint is None:
            return None
        if not eos and self._eos:
            raise YggdrasilError("a constraint ends the text by its end token; leave out ignore_eos")
        return self.grammars.compile(sampling.constraint)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammar constraints for the decoder's tokenizer, made at the first access.

        Raises:
            YggdrasilError: llguidance is not installed, or the model has no end token.
        """
        return GrammarCompiler(self.tokenizer, self._vocab_size, self._eos)


def with_grammar(model_free: DrafterGroup | None, sampler: Sampler | None) -> DrafterGroup | None:
    """Return the model-free drafters of a request with ``sampler``.

    Without a grammar (or with ``sampler`` None) they are ``model_free``, which may be None. With a grammar the result
    is a group, never None, that attaches the tokens which the grammar forces. If the grammar forces none, the group
    attaches the proposals of ``model_free`` that the grammar allows.
    """
    if sampler is None or sampler.grammar is None:
        return model_free
    return DrafterGroup([GrammarDrafter(sampler, model_free)])


class HostAcceptance:
    """Factory of one decoder's requests that choose and accept tokens on the host."""

    def __init__(self, assembly: Assembly, samplers: SamplerFactory) -> None:
        self._assembly, self._engine = assembly, assembly.engine
        self._samplers = samplers
        self._verify_widths = assembly.shapes.verify_widths
        self._target = assembly.logit_target

    def prepare(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        speculation: Speculation,
        policy: Policy,
        eos: frozenset[int],
        tolerance: float,
    ) -> PreparedRequest:
        """Check a request, and return its engine, policy, sampler, acceptance rule and report.

        Args:
            prompt: token ids.
            policy: chooses the tree shapes, unless ``speculation`` is off or has a fixed expansion.
            eos: ids of the request's end tokens.
            tolerance: lead in logits below which a decision is a near tie.

        Raises:
            YggdrasilError: parameters are incompatible with the model, the tree shapes or each other.
        """
        seed = sampling.seed if sampling.seed is not None else fresh_seed()
        sampler = self._samplers.full(prompt, sampling, seed, eos)
        drafter, chosen, drafts, set_up = self._drafting(sampler, speculation, policy)
        is_off = speculation.rule == "off"
        thinking = self._samplers.thinking_marks(speculation)
        rule = make_rule(
            speculation, 0.0 if is_off else tolerance, thinking, starts_thinking=starts_thinking(prompt, thinking)
        )
        width = self._fixed_width(speculation, drafts)

        def drawn() -> DrawnTree | None:
            return drafts.drawn if drafts is not None else None

        report = DecodingReport(
            rule=speculation.rule_name, lossless=speculation.is_lossless, temperature=sampling.temperature,
            seed=None if sampling.is_greedy else seed, exactness=speculation.exactness,
            tolerance=tolerance if speculation.exactness == "strict" or speculation.audit else None,
        )  # fmt: skip
        counts = rule.counts if isinstance(rule, MatchRule) and tolerance > 0 else None
        # Other schedules need acceptance on the device.
        is_planned = drafts is None and not is_off
        is_informed = is_planned and is_head_first(self._engine.schedule.labels)
        stages = HEAD_FIRST_ORDER if is_informed else DEFAULT_ORDER
        # With a lossy rule, copied tokens could be accepted for ever, so that the text repeats itself.
        is_model_free = speculation.rule == "match" and width is None
        engine = Engine(
            self._target, drafter, self._engine.tree, self._verify_widths, self._engine.max_length, stages,
            with_grammar(self._engine.model_free, sampler) if is_model_free else None,
        )  # fmt: skip
        return PreparedRequest(
            engine, chosen, report, sampler, AcceptanceSetup(sampler, rule, drawn, width), counts, is_planned, set_up
        )

    def _drafting(
        self, sampler: Sampler, speculation: Speculation, policy: Policy
    ) -> tuple[Drafter | None, Policy, ExpansionDrafter | None, Callable[[], None] | None]:
        if speculation.rule == "off":
            return self._engine.drafter, PLAIN_POLICY, None, None
        kind = DRAWN_KINDS.get(speculation.rule_name)
        if kind is None and speculation.expansion is None:
            drafter = self._engine.drafter
            if sampler.grammar is not None and drafter is not None:
                drafter = GrammarDrafter(sampler, drafter)
            return drafter, policy, None, None
        drafts = self._assembly.expansion_drafter
        expansion = self._expansion(speculation)
        shape = self._shape_of(expansion)
        return drafts, FixedPolicy(shape), drafts, partial(drafts.prepare, sampler, expansion, kind)

    def _expansion(self, speculation: Speculation) -> tuple[int, ...]:
        usual = _CHAIN if DRAWN_KINDS.get(speculation.rule_name) == "chain" else _TREE
        width = speculation.fixed_width if speculation.exactness == "fixed-width" else None
        return speculation.expansion or fitting_expansion(usual, self._assembly.shapes, width)

    def _shape_of(self, expansion: Sequence[int]) -> TreeShape:
        shapes = self._assembly.shapes
        if len(expansion) > shapes.max_depth:  # checked first: products of millions of levels would fill the memory
            raise YggdrasilError(f"the expansion has {len(expansion)} levels; the shapes hold {shapes.max_depth}")
        levels = list(accumulate(expansion, mul))
        needed = 1 + sum(levels)
        width = next((width for width in shapes.verify_widths if width >= needed), None)
        if width is None or needed > shapes.num_nodes:
            raise YggdrasilError(
                f"the expansion {','.join(map(str, expansion))} gives {needed} nodes in {len(expansion)} levels; the "
                f"shapes hold {min(shapes.verify_widths[-1], shapes.num_nodes)} nodes and {shapes.max_depth} levels"
            )
        return TreeShape(max(levels), len(expansion), width)

    def _fixed_width(self, speculation: Speculation, drafts: ExpansionDrafter | None) -> int | None:
        if speculation.exactness != "fixed-width":
            return None
        width = speculation.fixed_width
        widths = [width for width in self._verify_widths if width > 1]
        if width not in widths:
            raise YggdrasilError(f"fixed_width is {width}; the plan's verify widths are {widths}")
        if drafts is not None and speculation.rule_name in DRAWN_KINDS:
            expansion = self._expansion(speculation)
            if 1 + sum(accumulate(expansion, mul)) > width:
                raise YggdrasilError(f"fixed_width {width} cannot hold all drawn candidates; ask for a wider one")
        return width


class PolicyPerSetting:
    """Cache of policy copies, one per sampling setting and acceptance rule, because acceptance differs between them.

    At most 64 copies are kept; the least recently used copy is dropped first.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._unused: WeakKeyDictionary[Policy, Policy] = WeakKeyDictionary()  # policy -> its copy at first use
        self._copies: dict[tuple[object, ...], Policy] = {}

    def policy_for(self, policy: Policy, sampling: SamplingParams, speculation: Speculation) -> Policy:
        """Return the policy whose estimates belong to a request's sampling parameters and acceptance rule.

        This is ``policy`` itself for greedy requests with the rule "match", without logits processors,
        log-probabilities or fixed width. For all others it is a copy of ``policy`` in its state at the first call,
        which only requests with the same setting use.
        """
        width = speculation.fixed_width if speculation.exactness == "fixed-width" else None
        if policy not in self._unused:
            self._unused[policy] = copy.deepcopy(policy)
        if not sampling.needs_logits and speculation.rule == "match" and width is None:
            return policy
        # A rule of a user's own is an object, which may have no hash.
        rule = (speculation.rule_name, type(speculation.rule))
        key = (ref(policy), sampling.identity(), rule, width)
        if len(self._copies) == self._MOST and key not in self._copies:
            del self._copies[next(iter(self._copies))]
        kept = self._copies.pop(key) if key in self._copies else copy.deepcopy(self._unused[policy])
        self._copies[key] = kept  # most recently used last
        return kept
