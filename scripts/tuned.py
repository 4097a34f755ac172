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
    Tuned("policy.policy", "RegretBudget.GRANT", "initial and highest balance of a way to speculate, in plain steps"),
    Tuned("policy.policy", "RegretBudget.EARNED", "plain steps added to the budget per iteration without it"),
    Tuned("policy.policy", "RegretBudget.REOPENS", "balance in plain steps at which a closed budget reopens"),
    Tuned("policy.policy", "RegretBudget.WORST", "maximum charge of one tree, in plain steps"),
    Tuned("policy.policy", "DECAY", "decay of the moving averages of acceptance, per iteration", is_share=True),
    Tuned("policy.policy", "PRIOR", "weight of the estimates before any observation, in tokens"),
    Tuned("policy.policy", "INHERITED", "greatest weight of earlier requests' estimates in a new request, in tokens"),
    Tuned("policy.policy", "LatencyScales.COMMON_RATE", "share of a deviation by which all latency factors move"),
    Tuned("policy.policy", "LatencyScales.OWN_RATE", "share by which a step's own factor moves besides"),
    Tuned("policy.policy", "LatencyScales.PAUSE", "ratio of time to prediction at which a deviation is capped"),
    Tuned("policy.objective", "UNDERESTIMATE", "factor by which acceptance may exceed its estimate"),
    Tuned("drafters.ngram", "_BRANCHES", "continuations per n-gram lookup"),
    Tuned("drafters.ngram", "_MEMORY", "drafts per match size after which older ones count half"),
]
NOT_PLAYED = {  # what else has a number there
    "engine.assembly": {"READ_WIDTH": "a width of steps"},
    "engine.conversations": {"_MIN_ROWS": "rows below which a prefill costs less than copying stored KV entries"},
    "engine.host_acceptance": {"PolicyPerSetting._MOST": "a limit of memory: sampling settings with their own policy"},
    "engine.online_estimates": {
        "VERSION": "a file's version",
        "PRIOR_PASSES": "traces have no pass times",
        "SECONDS": "seconds between writes of a file",
        "BUSY": "traces have no pass times",
        "LEAST_PASSES": "traces have no pass times",
    },
    "engine.text_stream": {"_FARTHEST": "affects streaming only"},
    "engine.plan_parts": {
        "_OWN_WIDTH": "an assumption about a user's drafter before its first trees",
        "_OWN_MS": "an assumption about a user's drafter before its first trees",
        "_OWN_SURVIVAL": "an assumption about a user's drafter before its first trees",
    },
    "drafters.statistics.contexts": {
        "LONGEST": "a dimension of the scorer: its weights are fitted with this value",
        "TABLE_LENGTH": "a dimension of the scorer: its weights are fitted with this value",
        "NUM_CONTEXTS": "a dimension of the scorer: its weights are fitted with this value",
        "BRANCHES": "a size that the native code has too",
        "HIDDEN": "a dimension of the scorer",
        "TOKEN_BITS": "a size of keys",
        "MOST_TOKEN": "a size of keys",
    },
    "drafters.statistics.drafter": {
        "POOL_TOKENS": "a limit of memory",
        "_Counts._MOST": "a limit of memory",
        "LEAST_PATH": "replaced by a value from the plan's costs",
    },
    "drafters.draft_model": {"SHORT_HEAD": "a width of steps"},
    "drafters.expansion": {"_ORDER_STEP": "orders equal scores only"},
    "drafters.statistics.grown_table": {
        "MERGE_TOKENS": "tokens between merges of answers into a table",
        "MOST_KEPT": "a limit of memory",
        "OWN_WEIGHT": "replayed on recorded answers: values 1, 2, 4 and 8 give AAL 1.927, 1.940, 1.957 and 1.961",
    },
    "drafters.grammar": {"_FORCED": "the probability of a token that the grammar forces is 1 for the target"},
    "drafters.ngram": {"_BOUNDARY": "an id that no token has"},
    "drafters.statistics.draws": {
        "_NOISE": "traces are greedy: nothing is sampled",
        "_OTHERS": "traces are greedy: nothing is sampled",
        "_HOTTEST": "traces are greedy: nothing is sampled",
    },
    "drafters.statistics.shipped_table": {
        "_CONTENT": "a file's version",
        "ANSWERS_WEIGHT": "replayed on recorded answers: values 1, 2, 4 and 8 give AAL 2.06, 2.07, 2.08 and 2.09",
        "CODE_CHARACTERS": "a limit of the time of a first use",
        "LEAST_BYTES": "concerns smaller models than those recorded",
        "_PIECE": "a size of text pieces",
    },
    "drafters.statistics.table_files": {"NICENESS": "a process priority"},
    "policy.policy": {"LatencyScales.FARTHEST": "a limit of the first step's effect"},
    "tree.token_tree": {
        "CONSIDERED": "affects sampling only: traces are greedy",
        "MIN_LOG_PROBABILITY": "the lowest value that the calibration fits",
        "NO_SCORE": "marks a missing node",
        "MIN_DESCENT": "orders equal scores only",
    },
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
