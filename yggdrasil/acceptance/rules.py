"""Acceptance rules: walk a verified tree from its root and commit tokens.

Every rule raises an error for a tree whose candidates were drafted in another way than the rule requires, because the
output would have another distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from yggdrasil.acceptance.coins import Choice
from yggdrasil.acceptance.drawn import DrawKind, NodeDraws, accept_drawn, draw_token
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.speculation import OwnRule, Speculation
from yggdrasil.acceptance.verified import VerifiedTree
from yggdrasil.errors import YggdrasilError


class Walk(NamedTuple):
    """Result of a walk: the accepted rows, the root's first, and the committed token after each of them."""

    rows: list[int]  # row indices of the pass: 0 (the root), then a path of the tree
    tokens: list[int]  # as many as rows; the last one is the bonus token or an end token


@dataclass
class Counts:
    """Counts of near ties in one request, kept with ``exactness="strict"`` or ``audit``."""

    near_ties: int = 0  # decisions whose margin is below the tolerance
    width_one_passes: int = 0
    flips: int = 0  # near ties that a width-1 pass decides differently


@dataclass
class MatchRule:
    """Rule that samples from the target at each node, and descends while a child holds the sampled token.

    It is lossless on fixed trees: the tokens do not depend on the tree, which only decides whether the next row of
    logits is already computed. Choices with a margin below ``tolerance`` (logits) are recomputed by a width-1 pass. The
    recomputed choice is used if ``obeys``, else it is only counted.
    """

    tolerance: float = 0.0
    obeys: bool = True
    counts: Counts = field(default_factory=Counts)

    def walk(self, tree: VerifiedTree, sampler: Sampler) -> Walk:
        """Commit the target's choice after the root, and after each child that holds the choice before it.

        The last token is a choice that no child holds (the bonus token) or an end token. Where ``tree.replay`` is set,
        a choice with a margin below ``tolerance`` is made again from a width-1 pass, and replaced if ``obeys``.

        If no token can be chosen after an accepted child, the walk ends before that choice. The text may end there;
        otherwise the next iteration raises the error, as plain decoding does.

        Raises:
            YggdrasilError: the candidates of ``tree`` were drawn, or after the root no token is possible or a score is
                not finite.
            Exception: whatever a user's logits processor has raised after the root.
        """
        _refuse_drawn(tree, "match")
        rows, tokens, row = [0], list[int](), 0
        while True:
            logits = tree.logits[row]
            try:
                choice = sampler.choose(logits)
            except Exception:
                if not tokens:
                    raise
                return Walk(rows[:-1], tokens)
            if choice.margin < self.tolerance and tree.replay is not None:
                exact_logits = tree.replay(rows)
                exact = sampler.choose(exact_logits)
                self._count(choice, exact)
                if self.obeys:
                    choice, logits = exact, exact_logits
            sampler.push(choice.token, logits)
            tokens.append(choice.token)
            child = tree.children[row].get(choice.token)
            if child is None or sampler.has_ended:
                return Walk(rows, tokens)
            row = child
            rows.append(row)

    def _count(self, choice: Choice, exact: Choice) -> None:
        self.counts.near_ties += 1
        self.counts.width_one_passes += 1
        self.counts.flips += exact.token != choice.token


@dataclass(frozen=True)
class DrawnRule:
    """Rule that accepts drawn candidates with probability min(1, p / q); lossless on trees drawn as ``kind`` says.

    p is the target's probability of the candidate, q the drafter's.
    """

    name: str
    kind: DrawKind

    def walk(self, tree: VerifiedTree, sampler: Sampler) -> Walk:
        """Commit drawn candidates from the root on while one is accepted, then a token of the residual distribution.

        After a leaf, the last token is drawn from the target's own distribution. No token follows an end token.

        Raises:
            YggdrasilError: the candidates of ``tree`` were not drawn as ``kind`` says, a score is not finite, or no
                token is possible.
        """
        if tree.drawn is None or tree.drawn.kind != self.kind:
            found = "fixed beforehand" if tree.drawn is None else f"drawn as: {tree.drawn.kind}"
            raise YggdrasilError(f"the rule {self.name} accepts trees drawn as: {self.kind}; this one was {found}")
        rows, tokens, row = [0], [], 0
        while True:
            token, is_drawn = self._next(tree.drawn.draws.get(tree.nodes[row]), tree, row, sampler)
            sampler.push(token, tree.logits[row])
            tokens.append(token)
            if not is_drawn or sampler.has_ended:
                return Walk(rows, tokens)
            row = tree.children[row][token]
            rows.append(row)

    def _next(self, draws: NodeDraws | None, tree: VerifiedTree, row: int, sampler: Sampler) -> tuple[int, bool]:
        """Return (the token after ``row``, whether it is one of the drawn children)."""
        if draws is None:  # a leaf
            return sampler.choose(tree.logits[row]).token, False
        # Skipping a drawn child that was not verified would bias the output.
        assert set(draws.tokens) <= set(tree.children[row]), "a drawn child is missing from the verified tree"
        law = sampler.distribution(tree.logits[row])
        if law is None:
            return sampler.choose(tree.logits[row]).token, False  # raises: no token is possible
        coins = sampler.coins("target")
        token, law = accept_drawn(law, draws, self.kind, coins)
        return (draw_token(law, coins), False) if token is None else (token, True)


@dataclass(frozen=True)
class TypicalRule:
    """Lossy rule that accepts the longest path whose tokens have p > min(epsilon, delta * exp(-entropy)).

    This is Medusa's typical acceptance (Cai et al. 2024, section 2.3.1). At temperature 0 only the argmax token is
    accepted.
    """

    epsilon: float
    delta: float

    def walk(self, tree: VerifiedTree, sampler: Sampler) -> Walk:
        """Commit the longest path of ``tree`` whose tokens are typical, then the target's choice.

        A token is typical if its probability exceeds min(epsilon, delta * exp(-entropy)). Of several longest paths, the
        most probable is taken. No choice follows an end token.

        Raises:
            YggdrasilError: the candidates of ``tree`` were drawn, a score is not finite, or no token is possible.
        """
        _refuse_drawn(tree, "typical")
        accepted = {0: 0.0}  # row -> log-probability of its path
        depth = {0: 0}
        for row, children in enumerate(tree.children):
            if row not in accepted or not children or (row and sampler.ends(tree.tokens[row])):
                continue
            law = sampler.distribution(tree.logits[row], tree.path(row))
            if law is None:
                continue
            possible = law[law > 0]
            bound = min(self.epsilon, self.delta * float(np.exp((possible * np.log(possible)).sum())))
            for token, child in children.items():
                if law[token] > bound:
                    accepted[child] = accepted[row] + float(np.log(law[token]))
                    depth[child] = depth[row] + 1
        best = max(accepted, key=lambda row: (depth[row], accepted[row]))
        return _follow(tree, best, sampler)


@dataclass(frozen=True)
class RelaxedRule:
    """Lossy rule that accepts children in the top ``topk`` and within ``delta`` of the highest log-probability.

    This is TensorRT-LLM's relaxed acceptance. With ``thinking`` (begin and end token), children are accepted in this
    way only between these two tokens. The target's own choice takes precedence if a child holds it.
    """

    topk: int
    delta: float
    thinking: tuple[int, int] | None = None
    starts_thinking: bool = False  # whether the prompt ends inside the thinking section

    def walk(self, tree: VerifiedTree, sampler: Sampler) -> Walk:
        """Commit tokens from the root on: the target's choice if a child holds it, else the best acceptable child.

        A child is acceptable if it is among the ``topk`` best tokens and within ``delta`` of the best log-probability.
        With ``thinking``, no child is acceptable outside of the thinking section. The walk ends with the target's
        choice where no child holds it or is acceptable, or with an end token.

        Raises:
            YggdrasilError: the candidates of ``tree`` were drawn, a score is not finite, or no token is possible.
        """
        _refuse_drawn(tree, "relaxed")
        rows, tokens, row = [0], [], 0
        while True:
            choice = sampler.choose(tree.logits[row]).token
            token = choice
            if choice not in tree.children[row] and self._is_relaxed(sampler.tokens):
                token = self._best_child(tree, row, sampler, choice)
            sampler.push(token, tree.logits[row])
            tokens.append(token)
            child = tree.children[row].get(token)
            if child is None or sampler.has_ended:
                return Walk(rows, tokens)
            row = child
            rows.append(row)

    def _is_relaxed(self, generated: Sequence[int]) -> bool:
        """Return whether the next token is accepted by the relaxed criterion."""
        if self.thinking is None:
            return True
        marks = [token for token in generated if token in self.thinking]
        return marks[-1] == self.thinking[0] if marks else self.starts_thinking

    def _best_child(self, tree: VerifiedTree, row: int, sampler: Sampler, choice: int) -> int:
        """Return the acceptable child of ``row`` with the highest score; ``choice`` if there is none."""
        scores = sampler.scores(tree.logits[row])
        best = scores.topk(min(self.topk, scores.shape[0]))
        floor = float(best.values[0]) - self.delta
        candidates = {
            token
            for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            if score >= floor and score > float("-inf")
        }
        acceptable = [token for token in tree.children[row] if token in candidates]
        return max(acceptable, key=lambda token: float(scores[token]), default=choice)


Rule: TypeAlias = MatchRule | DrawnRule | TypicalRule | RelaxedRule | OwnRule


def accepted_walk(rule: Rule, tree: VerifiedTree, sampler: Sampler) -> Walk:
    """Return the result of ``rule.walk``, which is checked if the rule is a user's.

    Raises:
        YggdrasilError: a user's rule returned no ``Walk``, rows that are no path from the root, or other tokens than it
            pushed to ``sampler``; or ``walk`` raised it.
    """
    num_before = len(sampler.tokens)
    walk = rule.walk(tree, sampler)
    if isinstance(rule, MatchRule | DrawnRule | TypicalRule | RelaxedRule):
        return walk
    if fault := _fault_of(walk, tree, sampler.tokens[num_before:]):
        raise YggdrasilError(f"the acceptance rule {rule.name} returned {fault}")
    return cast("Walk", walk)


def _fault_of(walk: Any, tree: VerifiedTree, pushed: Sequence[int]) -> str | None:
    """Return what is wrong with a user's walk, or None. ``pushed``: tokens that the rule gave to the sampler."""
    if not isinstance(walk, Walk):
        return f"{type(walk).__name__}, not a Walk of rows and tokens"
    rows, tokens = list(walk.rows), list(walk.tokens)
    if len(rows) != len(tokens) or not rows or rows[0] != 0:
        return f"{len(rows)} rows and {len(tokens)} tokens; there must be as many of both, and row 0 first"
    path = [0]
    for token in tokens[:-1]:
        path.append(tree.children[path[-1]].get(token, -1))
        if path[-1] < 0:
            break
    if rows != path:
        return f"the rows {rows}, which are no path of the tree with the tokens {tokens}"
    if tokens != list(pushed):
        return f"the tokens {tokens}, but pushed {list(pushed)} to the sampler"
    return None


def make_rule(
    settings: Speculation, tolerance: float, thinking: tuple[int, int] | None = None, *, starts_thinking: bool = False
) -> Rule:
    """Return the acceptance rule of a request's ``settings``; "off" gives the rule ``match``.

    A user's own rule is returned as it is. With ``settings.audit`` the rule ``match`` counts the recomputed choices
    that differ, and does not use them.

    Args:
        tolerance: margin in logits below which the rule ``match`` recomputes a choice by a width-1 pass; 0 for never.
        thinking: begin and end token of the thinking section, outside of which the rule ``relaxed`` accepts only the
            target's choice. With None there is no such limit.
        starts_thinking: whether the prompt ends inside the thinking section.
    """
    if not isinstance(settings.rule, str):
        return settings.rule
    if settings.rule == "typical":
        return TypicalRule(settings.typical_epsilon, settings.typical_delta)
    if settings.rule == "relaxed":
        return RelaxedRule(settings.relaxed_topk, settings.relaxed_delta, thinking, starts_thinking)
    if settings.rule in DRAWN_KINDS:
        return DrawnRule(settings.rule, DRAWN_KINDS[settings.rule])
    return MatchRule(tolerance, obeys=not settings.audit)


DRAWN_KINDS: dict[str, DrawKind] = {
    "leviathan": "chain",
    "specinfer": "with replacement",
    "sequoia": "without replacement",
}


def _refuse_drawn(tree: VerifiedTree, name: str) -> None:
    """Raise YggdrasilError if the candidates of ``tree`` were drawn at random."""
    if tree.drawn is not None:
        raise YggdrasilError(f"the rule {name} is for trees fixed beforehand; this one was drawn as: {tree.drawn.kind}")


def _follow(tree: VerifiedTree, last: int, sampler: Sampler) -> Walk:
    """Commit the path to row ``last``, then choose and commit the token after it, unless the text has ended."""
    rows = [last]
    while rows[0]:
        rows.insert(0, tree.parents[rows[0]])
    tokens = tree.path(last)
    for row, token in zip(rows, tokens, strict=False):
        sampler.push(token, tree.logits[row])
    if not sampler.has_ended:
        tokens.append(sampler.choose(tree.logits[last]).token)
        sampler.push(tokens[-1], tree.logits[last])
    else:
        rows.pop()  # no token follows the row of the end token
    return Walk(rows, tokens)
