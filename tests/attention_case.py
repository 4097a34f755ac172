"""A random step for the attention operators, and the loop over single keys that they are held against."""

import copy
import math
import random

import torch


class AttentionCase:
    """Inputs of one random step: ``num_context`` committed slots, ``num_before`` tree nodes of earlier steps, W rows.

    Every node sees its path: the context, its ancestors and itself. Parents come before their children. Outputs are
    query_rows for of all rows, or with ``has_fewer_queries`` of some, ``query_rows``.
    """

    def __init__(
        self,
        seed,
        dtype,
        *,
        head_dim=None,
        num_context=None,
        width=None,
        num_before=None,
        group=None,
        has_fewer_queries=False,
    ):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.width = rng.randint(1, 20) if width is None else width
        self.num_context = rng.choice([0, 1, 9, 63, 64, 65, 150]) if num_context is None else num_context
        num_before = rng.choice([0, 0, 5]) if num_before is None else num_before
        head_dim = rng.choice([8, 16, 20, 32, 64, 72, 96, 128]) if head_dim is None else head_dim
        key_heads = rng.randint(1, 3)
        drawn_group = rng.choice([1, 1, 2, 5])
        query_heads = key_heads * (drawn_group if group is None else group)
        self.paths = []
        for node in range(num_before + self.width):
            parent = rng.randrange(-1, node)
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), node])
        num_slots = num_before + self.width + rng.choice([0, 3])
        self.mask = torch.zeros(self.width, num_slots, dtype=torch.bool)
        for row in range(self.width):
            self.mask[row, self.paths[num_before + row]] = True
        capacity = self.num_context + num_before + self.width + rng.choice([0, 1, 30])
        self.offsets = torch.tensor([self.num_context, self.num_context + num_before])

        # As models hand them over: [1, W, H, D] seen as [1, H, W, D].
        def rows(heads):
            return torch.randn(1, self.width, heads, head_dim).to(dtype).transpose(1, 2)

        self.query, self.key, self.value = rows(query_heads), rows(key_heads), rows(key_heads)
        self.caches = [torch.randn(key_heads, capacity, head_dim).to(dtype) for _ in range(2)]
        self.sinks = torch.randn(query_heads).to(dtype) * 3
        self.scale = rng.choice([head_dim**-0.5, 0.3])
        self.query_rows = list(range(self.width))
        if has_fewer_queries:
            self.query_rows = sorted(rng.sample(self.query_rows, rng.randint(1, self.width)))
            self.query, self.mask = self.query[:, :, self.query_rows], self.mask[self.query_rows]

    def first(self, width):
        """The same step of its first ``width`` rows only."""
        case = copy.copy(self)
        case.width, case.query_rows, case.mask = width, list(range(width)), self.mask[:width]
        case.query, case.key, case.value = (each[:, :, :width] for each in (self.query, self.key, self.value))
        return case

    def run(self, function, window=0, softcap=0.0, num_threads=1, sinks=None):
        """The output [1, R, Hq, D] and the two caches afterwards."""
        caches = [cache.clone() for cache in self.caches]
        output = function(
            self.query,
            self.key,
            self.value,
            *caches,
            self.offsets,
            self.mask,
            self.scale,
            window,
            softcap,
            sinks,
            num_threads,
        )
        return output, *caches

    def run_slowly(self, window=0, softcap=0.0, sinks=None):
        """The output, one query head of one row at a time, over a list of the keys it sees."""
        num_before = int(self.offsets[1]) - self.num_context
        keys, values = (cache.clone() for cache in self.caches)
        first = int(self.offsets[1])
        keys[:, first : first + self.width], values[:, first : first + self.width] = self.key[0], self.value[0]
        group = self.query.shape[1] // self.key.shape[1]
        output = torch.zeros(1, len(self.query_rows), self.query.shape[1], self.query.shape[3])
        for row, query_rows in enumerate(self.query_rows):
            tree_slots = [self.num_context + node for node in self.paths[num_before + query_rows]]
            seen = [*range(self.num_context), *tree_slots]
            if window > 0:
                seen = seen[-window:]
            elif window < 0:  # those of its chunk
                seen = seen[(len(seen) - 1) // -window * -window :]
            for head in range(self.query.shape[1]):
                query = self.query[0, head, row].float()
                scores = [float(query @ keys[head // group, slot].float()) * self.scale for slot in seen]
                if softcap:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                scores += [] if sinks is None else [float(sinks[head])]
                weights = torch.tensor(scores).softmax(0)[: len(seen)]
                output[0, row, head] = weights @ values[head // group, seen].float()
        return output.to(self.query.dtype)
