"""Sampling as tensor code of static shapes, for captured steps: the equivalent of ``Sampler`` for all rows at once.

Dims: W rows, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.acceptance.coins import draw_key
from yggdrasil.acceptance.sampling import GREEDY, MAX_TOP_LOGPROBS, SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, Speculation, starts_thinking
from yggdrasil.native.random_numbers import gumbel_noise

DeviceRule = Literal["match", "typical", "relaxed"]

_FEW_LOGPROBS = 5  # log-probabilities per row that most requests ask for at most; others get the most allowed


@dataclass(frozen=True)
class SamplingKind:
    """The operations that a request needs to choose and accept its tokens; each kind has its own captured graphs."""

    shapes: bool = False  # whether it has biases, penalties or a minimum length
    truncates: bool = False  # whether it has top-k or top-p, which sort the vocabulary
    is_typical: bool = False  # whether it has typical-p, which sorts the vocabulary
    is_masked: bool = False  # whether the host writes the tokens allowed after each row: a constraint or bad words
    num_top: int | None = None  # highest log-probabilities reported for each token; None: no log-probabilities
    rule: DeviceRule = "match"

    @property
    def name(self) -> str:
        """Suffix of the names of steps compiled for this sampling kind, such as ``-truncated-match``."""
        parts = {
            "shaped": self.shapes, "truncated": self.truncates, "typical-p": self.is_typical, "masked": self.is_masked,
        }  # fmt: skip
        top = [] if self.num_top is None else [f"top{self.num_top}"]
        return "-".join(["", *(name for name, has in parts.items() if has), *top, self.rule])


def kind_on_device(params: SamplingParams, speculation: Speculation = DEFAULT) -> SamplingKind | None:
    """Return the operations with which a GPU's captured graphs choose and accept the tokens of a request.

    The result is None if the host must choose the tokens from copied logits: for a request with ``logits_processors``,
    or with an acceptance rule that samples the drafted tokens or is a user's own.
    """
    rule = "match" if speculation.rule == "off" else speculation.rule
    if rule not in get_args(DeviceRule) or params.logits_processors:
        return None
    has_penalties = bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0
    num_top = params.logprobs
    if num_top:
        num_top = _FEW_LOGPROBS if num_top <= _FEW_LOGPROBS else MAX_TOP_LOGPROBS
    return SamplingKind(
        shapes=has_penalties or bool(params.logit_bias) or params.min_new_tokens > 0,
        truncates=not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0),
        is_typical=not params.is_greedy and params.typical_p < 1.0,
        is_masked=params.constraint is not None or bool(params.bad_words),
        num_top=num_top,
        rule=cast("DeviceRule", rule),
    )


class SamplingInputs(NamedTuple):
    """Tensors that captured steps read: parameters of one request, its text's token counts and its masks."""

    key: Tensor  # [1] int64, of the random stream
    top_k: Tensor  # [1] int64
    relaxed_topk: Tensor  # [1] int64
    first_end: Tensor  # [1] int64, the least text index at which a token may end the text
    thinking: Tensor  # [3] int64: begin and end token of the thinking section, 1 if in it; without one -1, -1, 1
    temperature: Tensor  # [1] float32; 1 for greedy requests
    is_drawn: Tensor  # [1] float32; 0 for greedy requests
    refused_mass: Tensor  # [1] float32, 1 - top_p
    min_p: Tensor  # [1] float32
    typical_p: Tensor  # [1] float32
    penalties: Tensor  # [3] float32: repetition, presence, frequency
    thresholds: Tensor  # [2] float32: epsilon and delta of "typical", or delta of "relaxed" and 0
    vocabulary: Tensor  # [V] int64: 0 to V - 1
    bias: Tensor  # [V] float32
    in_prompt: Tensor  # [V] float32; 1 for tokens of the prompt
    counts: Tensor  # [V] float32, occurrences in the generated text
    ends: Tensor  # [V] float32; 1 for tokens that end the text
    masks: Tensor  # [rows, bytes] uint8; bit t of a row is set if token t may follow it


class SamplingTensors:
    """Sampling parameters and token counts of one request, in tensors that captured steps read.

    The host writes them only between requests, except the masks. Committed tokens are counted on the device
    (``count``).
    """

    def __init__(self, vocab_size: int, device: torch.device, most_rows: int = 1) -> None:
        def floats(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        self._vocab_size = vocab_size
        integers = [torch.zeros(size, dtype=torch.int64, device=device) for size in (1, 1, 1, 1, 3)]
        numbers = [floats(size) for size in (1, 1, 1, 1, 1, 3, 2)]
        # NOTE: the step reads these numbers from memory, because products with them wrap around. If they were a loop's
        # counter, a C++ compiler would rule that out, and TorchInductor's CPU code would write past its buffers.
        vocabulary = torch.arange(vocab_size, device=device)
        masks = torch.zeros(most_rows, -(-vocab_size // 8), dtype=torch.uint8, device=device)
        texts = [floats(vocab_size) for _ in range(4)]
        self.inputs = SamplingInputs._make([*integers, *numbers, vocabulary, *texts, masks])
        self._staged = torch.zeros(masks.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staged_bytes = self._staged.numpy()
        self.begin(GREEDY, 0, ())

    def begin(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        speculation: Speculation = DEFAULT,
        eos: Collection[int] = (),
        thinking: tuple[int, int] | None = None,
    ) -> None:
        """Write the parameters of the next request to the tensors, and set the token counts to zero.

        Args:
            seed: seed of the request's random numbers.
            prompt: token ids, which the repetition penalty counts.
            speculation: gives the thresholds of the acceptance rule.
            eos: token ids that end the text.
            thinking: begin and end token of the thinking section, outside of which the rule "relaxed" accepts only the
                target's choice. With None there is no such limit.
        """
        inputs, is_drawn = self.inputs, not params.is_greedy
        values: tuple[tuple[Tensor, list[float]], ...] = (
            (inputs.key, [draw_key(seed)]),
            (inputs.top_k, [min(params.top_k, self._vocab_size) or self._vocab_size]),
            (inputs.relaxed_topk, [min(speculation.relaxed_topk, self._vocab_size)]),
            (inputs.first_end, [len(prompt) + params.min_new_tokens]),
            (inputs.thinking, [*(thinking or (-1, -1)), thinking is None or starts_thinking(prompt, thinking)]),
            (inputs.temperature, [params.temperature if is_drawn else 1.0]),
            (inputs.is_drawn, [is_drawn]),
            (inputs.refused_mass, [1.0 - params.top_p]),
            (inputs.min_p, [params.min_p if is_drawn else 0.0]),
            (inputs.typical_p, [params.typical_p]),
            (inputs.penalties, [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]),
            (inputs.thresholds, _thresholds(speculation)),
        )
        for tensor, numbers in values:
            tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype))
        bias, in_prompt, ends = (torch.zeros(self._vocab_size) for _ in range(3))
        for token, value in params.logit_bias.items():
            bias[token] = value
        in_prompt[list(prompt)] = 1.0
        ends[[token for token in eos if token < self._vocab_size]] = 1.0
        self.inputs.ends.copy_(ends)
        self.inputs.bias.copy_(bias)
        self.inputs.in_prompt.copy_(in_prompt)
        self.inputs.counts.zero_()

    def write_masks(self, masks: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Write which tokens are allowed after the first rows of the next pass; other rows keep their old masks.

        The copy is asynchronous and ordered after the device's earlier work. The host's buffer is reused, so the last
        pass with masks must have ended before.

        Args:
            masks: one [ceil(V / 8)] uint8 array per row. Token t may follow the row if bit t % 8 of byte t // 8 is set.
        """
        size = self.inputs.masks.shape[1]
        for row, mask in enumerate(masks):
            self._staged_bytes[row] = mask[:size]
        self.inputs.masks[: len(masks)].copy_(self._staged[: len(masks)], non_blocking=True)

    def count(self, tokens: Tensor, exist: Tensor) -> None:
        """Count those of the generated ``tokens`` [W] int64 for which ``exist`` [W] is True, in the order of the text.

        This updates the token counts, and whether the text is in the thinking section.
        """
        self.inputs.counts.index_add_(0, tokens, exist.to(torch.float32))
        self.inputs.thinking[2:] = is_thinking(tokens, exist[None], self.inputs)


def is_thinking(tokens: Tensor, path: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return whether the text is in the thinking section after each of R paths, [R] bool.

    Args:
        tokens: [W] int64 drafted or generated tokens, in the order of the text.
        path: [R, W] bool, the tokens of each path after the text.
    """
    begin, end, thinks = inputs.thinking.split(1)
    numbers = torch.arange(tokens.shape[0], device=tokens.device)
    last = torch.where(path & ((tokens == begin) | (tokens == end)), numbers, -1).amax(1)
    return torch.where(last < 0, thinks > 0, tokens[last.clamp(min=0)] == begin)


def process(
    kind: SamplingKind, logits: Tensor, path_counts: Tensor | None, positions: Tensor, inputs: SamplingInputs
) -> Tensor:
    """Apply a request's sampling parameters to ``logits``: return scores [W, V] float32, -inf for excluded tokens.

    The parameters are bias, penalties, minimum length, token masks, temperature, top-k, top-p, min-p and typical-p,
    applied in this order. The scores contain no noise: their softmax is the distribution from which ``draw`` samples.

    Args:
        kind: the operations to apply.
        logits: [W, V].
        path_counts: [W, V] float32, occurrences of each token on the row's path below the root, from
            ``counts_on_path``; None if all are zero.
        positions: [W] int64 index in the text of the token that each row predicts, for the minimum length.
        inputs: parameters and token counts of the request.
    """
    scores = logits.float()
    if kind.shapes:
        scores = _shaped(scores, path_counts, positions, inputs)
    if kind.is_masked:
        bits = inputs.masks[: scores.shape[0]].index_select(1, inputs.vocabulary >> 3)
        allowed = (bits >> (inputs.vocabulary & 7).to(torch.uint8)) & 1
        scores = torch.where(allowed > 0, scores, float("-inf"))
    scores = scores / inputs.temperature
    if kind.truncates:
        scores = _truncated(scores, inputs.top_k, inputs.refused_mass)
    best = scores.amax(-1, keepdim=True)
    scores = torch.where(torch.exp(scores - best) < inputs.min_p, float("-inf"), scores)
    return _typical(scores, inputs.typical_p) if kind.is_typical else scores


def draw(scores: Tensor, positions: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the token after each row, [W] int64: drawn with probability softmax(scores), or the argmax if greedy.

    Args:
        scores: [W, V] float32, from ``process``.
        positions: [W] int64 indices of the chosen tokens in the text.
    """
    noise = gumbel_noise(inputs.key, positions[:, None], inputs.vocabulary)
    return torch.where(inputs.is_drawn > 0, scores + noise, scores).argmax(-1)


def logprob_words(logits: Tensor, choices: Tensor, num_top: int) -> Tensor:
    """Pack log-probabilities into int64 words, [W * (1 + 2 K)] with K = min(``num_top``, V), for one copy to the host.

    In order: the float64 bits of the log-probabilities of ``choices`` [W], the float64 bits of the K highest ones of
    each row, and their K token ids of each row.

    Args:
        logits: [W, V].
    """
    values = logits.float().log_softmax(-1)
    best = values.topk(min(num_top, logits.shape[-1]))
    found = torch.cat([values.gather(1, choices[:, None]).flatten(), best.values.flatten()])
    return torch.cat([found.double().view(torch.int64), best.indices.flatten()])


def counts_on_path(tokens: Tensor, ancestors: Tensor, vocab_size: int) -> Tensor:
    """Count how often each token occurs on the path from below the root (row 0) to each row, that row included.

    Returns [W, V] float32.

    Args:
        tokens: [W] int64 token of each row.
        ancestors: [W, W] bool; [i, j] is true if row j is on the path to row i, also for j = i.
    """
    width = tokens.shape[0]
    below = ancestors & (torch.arange(width, device=tokens.device) > 0)
    counts = torch.zeros(width, vocab_size, dtype=torch.float32, device=tokens.device)
    return counts.scatter_add(1, tokens.expand(width, width), below.to(torch.float32))


def _shaped(scores: Tensor, path_counts: Tensor | None, positions: Tensor, inputs: SamplingInputs) -> Tensor:
    """Apply the bias, transformers' repetition penalty, presence and frequency penalties, then the minimum length."""
    repetition, presence, frequency = inputs.penalties.split(1)
    counts = inputs.counts if path_counts is None else inputs.counts + path_counts
    scores = scores + inputs.bias
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(inputs.in_prompt + counts > 0, repeated, scores)
    scores = torch.where(counts > 0, scores - (presence + frequency * counts), scores)
    is_early = positions < inputs.first_end
    return torch.where(is_early[:, None] & (inputs.ends > 0), float("-inf"), scores)


def _truncated(scores: Tensor, top_k: Tensor, refused_mass: Tensor) -> Tensor:
    """Apply top-k, then top-p: keep the fewest highest scores whose probability is at least 1 - ``refused_mass``.

    Scores equal to the lowest kept score are kept too, so the order of equal scores does not matter. All other scores
    become -inf.
    """
    size = scores.shape[-1]
    ascending = scores.sort(-1).values
    least = ascending.index_select(-1, size - top_k)  # [W, 1]
    kept = torch.where(ascending < least, float("-inf"), ascending)
    refused = kept.softmax(-1).cumsum(-1) <= refused_mass
    first = refused.sum(-1, keepdim=True).clamp(max=size - 1)
    return torch.where(scores < torch.maximum(least, ascending.gather(-1, first)), float("-inf"), scores)


def _typical(scores: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the tokens whose log-probability is closest to the negative entropy, with a total probability ``typical_p``.

    All other scores become -inf. The function does what transformers' ``TypicalLogitsWarper`` does.
    """
    logprobs = scores.log_softmax(-1)
    entropy = -(logprobs * logprobs.exp()).nansum(-1, keepdim=True)  # NaN where the probability is 0
    distance, order = (logprobs + entropy).abs().sort(-1)
    is_within = scores.gather(-1, order).softmax(-1).cumsum(-1) < typical_p
    last = is_within.sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    return torch.where((logprobs + entropy).abs() > distance.gather(-1, last), float("-inf"), scores)


def _thresholds(speculation: Speculation) -> list[float]:
    if speculation.rule == "typical":
        return [speculation.typical_epsilon, speculation.typical_delta]
    return [speculation.relaxed_delta, 0.0]
