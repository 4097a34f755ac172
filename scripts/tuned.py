"""Tuned numbers of the packages that decode, by their place; scripts/tuned_numbers.py says what each does."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from sys import modules
from typing import NamedTuple


class Tuned(NamedTuple):
    """A number that decoding decides by and that could be another; ``is_share``: one minus it is halved and doubled."""

    module: str
    name: str  # in the module; of a class: behind its name and a dot
    meaning: str
    is_share: bool = False

    @property
    def holder(self) -> object:
        """The module or the class."""
        outer: list[str] = self.name.split(".")[:-1]
        return reduce(getattr, outer, import_module(f"yggdrasil.{self.module}"))

    @property
    def value(self) -> float:
        """What it is now."""
        value: float = getattr(self.holder, self.name.split(".")[-1])
        return value

    def scaled(self, factor: float) -> float:
        """Half or twice as much."""
        if self.is_share:
            return 1.0 - (1.0 - self.value) * factor
        return max(round(self.value * factor), 1) if isinstance(self.value, int) else self.value * factor


TUNED = [
    Tuned("policy.regret", "RegretBudget.GRANT", "plain steps that a way to speculate may lose at first"),
    Tuned("policy.regret", "RegretBudget.EARNED", "plain steps that an iteration without it earns"),
    Tuned("policy.regret", "RegretBudget.REOPENS", "balance with which a closed budget opens again"),
    Tuned("policy.regret", "RegretBudget.MOST", "plain steps of gain that are kept to be lost again"),
    Tuned("policy.regret", "RegretBudget.WORST", "plain steps that one tree may be charged"),
    Tuned("policy.regret", "PlainProbe.STEPS", "plain steps of a forced probe"),
    Tuned("policy.regret", "PlainProbe.EVERY", "iterations between forced probes"),
    Tuned("policy.acceptance", "DECAY", "of the moving averages of acceptance, an iteration", is_share=True),
    Tuned("policy.acceptance", "PRIOR", "tokens in which estimates were right beforehand"),
    Tuned("policy.costs", "LatencyScales.COMMON_RATE", "of a deviation, what all latency scales follow"),
    Tuned("policy.costs", "LatencyScales.OWN_RATE", "of a deviation, what the scale of its own kind follows"),
    Tuned("policy.costs", "LatencyScales.PAUSE", "times its prediction: a step beyond it is a pause"),
    Tuned("policy.objective", "UNDERESTIMATE", "times its estimate: what a path may be accepted"),
    Tuned("drafters.statistics.portable", "MAX_CONTINUATIONS", "continuations of a context that are looked at"),
    Tuned("drafters.statistics.best_first", "BRANCHES", "children of a node"),
    Tuned("drafters.statistics.portable", "MOST_LIKELY", "probability of all children together", is_share=True),
    Tuned("drafters.statistics.best_first", "LEAST_LIKELY", "probability below which a child is left out"),
    Tuned("drafters.ngram", "_BRANCHES", "continuations of a look-up"),
    Tuned("drafters.ngram", "_MEMORY", "guesses of a match size after which older ones count half"),
]
NOT_PLAYED = {  # what else has a number there
    "engine.assembly": {"READ_WIDTH": "a size of steps"},
    "engine.conversations": {"_MIN_ROWS": "the smallest prefill"},
    "engine.host_acceptance": {"PolicyPerSetting._MOST": "sampling settings that are remembered"},
    "engine.online_estimates": {
        "VERSION": "of a file",
        "PRIOR_PASSES": "passes are not recorded",
        "SECONDS": "how often a file is written",
    },
    "engine.text_stream": {"_FARTHEST": "where texts are cut into pieces"},
    "engine.plan_parts": {
        "_OWN_WIDTH": "of a drafter that nothing is known of",
        "_OWN_MS": "of a drafter that nothing is known of",
        "_OWN_SURVIVAL": "of a drafter that nothing is known of",
    },
    "drafters.statistics.portable": {
        "LONGEST": "features: weights are fitted to it",
        "TABLE_LENGTH": "features: weights are fitted to it",
        "NUM_CONTEXTS": "features: weights are fitted to it",
        "HIDDEN": "a size of what is fitted",
        "RUNNERS_UP": "features: weights are fitted to it",
        "_BITS": "a size of keys",
        "MOST_TOKEN": "a size of keys",
        "LEAST_PATH": "until a plan's costs say it",
    },
    "drafters.statistics.drafter": {"POOL_TOKENS": "a bound of memory", "_NativeStatistics._MOST": "a bound of memory"},
    "drafters.draft_model": {"SHORT_HEAD": "a size of steps"},
    "drafters.expansion": {"_ORDER_STEP": "an order among equals"},
    "drafters.statistics.grown_table": {
        "MERGE_TOKENS": "how often answers are merged into a table",
        "MOST_KEPT": "a bound of memory",
        "OWN_WEIGHT": "replayed on recorded answers: 1, 2, 4 and 8 give AAL 1.927, 1.940, 1.957 and 1.961",
    },
    "drafters.grammar": {"_FORCED": "tokens that a grammar forces are all but certain"},
    "drafters.lookahead": {
        "_MEMORY": "windows are not recorded",
        "_MOST_LIKELY": "windows are not recorded",
        "_KEPT": "windows are not recorded",
    },
    "drafters.ngram": {"_BOUNDARY": "no token"},
    "drafters.statistics.shipped_table": {
        "CODE_CHARACTERS": "a bound of the time that a first use takes",
        "LEAST_BYTES": "of models that are not recorded",
        "_PIECE": "a size of pieces of text",
    },
    "drafters.statistics.table_files": {
        "NICENESS": "of a process",
    },
    "tree.growth": {"MIN_LOG_PROBABILITY": "the least that a calibration knows"},
    "policy.acceptance": {
        "_TINY": "nothing is divided by zero",
        "DraftedTrees._TYPICAL_EVERY": "how often a table is looked at, which takes a tenth of a millisecond",
    },
    "drafters.statistics.best_first": {"_ROUNDING": "scores are kept as float32"},
    "policy.costs": {"LatencyScales.FARTHEST": "a bound of what one step may say"},
    "tree.token_tree": {"NO_SCORE": "no node", "MIN_DESCENT": "an order among equals"},
}


@contextmanager
def changed(tuned: Tuned, factor: float) -> Iterator[None]:
    """Decode with another value of it for a while, in all modules that have it by its name."""
    name, value, other = tuned.name.split(".")[-1], tuned.value, tuned.scaled(factor)
    own = [each for key, each in modules.items() if key.startswith("yggdrasil.") and "." not in tuned.name]
    holders = [tuned.holder, *(each for each in own if vars(each).get(name) is value)]
    for holder in holders:
        setattr(holder, name, other)
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, name, value)
