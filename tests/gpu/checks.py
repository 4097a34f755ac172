"""What only a CUDA device can show, as plain functions.

``test_gpu.py`` runs them under pytest, ``scripts/check_cuda.py`` also without it.

Every check raises AssertionError, or whatever went wrong.
"""

import copy

import torch
from attention_case import AttentionCase
from tiny_pair import TEXT, TinyPair, make_pair

from yggdrasil import native
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.compiler.in_process import InProcessStep
from yggdrasil.drafters import NGramDrafter
from yggdrasil.native import portable
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

DEVICE = torch.device("cuda")
PROMPT = TEXT[:20]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
FEW = Shapes(max_length=120, draft_widths=(4,), max_depth=3, candidates=4, verify_widths=(1, 8), prefill_widths=(16,))


def pair_on_device(dtype=torch.float32):
    """The tiny pair, on the device; its references stay on the CPU."""
    pair = make_pair()
    target, drafter = (
        prepare_model(copy.deepcopy(model).to(DEVICE, dtype), "tiny", 1)
        for model in (pair.plain_target, pair.plain_drafter)
    )
    return TinyPair(target, drafter, pair.plain_target, pair.plain_drafter)


def attention_on_device(dtype, window, softcap, seed):
    """Outputs and caches of the CUDA operator and of the portable one, on the same random step."""
    case = AttentionCase(seed, dtype)
    for name in ("query", "key", "value", "offsets", "mask"):
        setattr(case, name, getattr(case, name).to(DEVICE))
    case.caches = [cache.to(DEVICE) for cache in case.caches]
    sinks = case.sinks.to(DEVICE) if seed % 2 else None
    ours = case.run(torch.ops.yggdrasil.tree_attention, window, softcap, sinks=sinks)
    return ours, case.run(portable.tree_attention, window, softcap, sinks=sinks)


def check_triton_is_used():
    assert native.cuda_operators()["tree_attention"] is not portable.tree_attention


def check_attention_equals_the_portable_one():
    for dtype, tolerance in TOLERANCE.items():
        for window, softcap in ((0, 0.0), (4, 0.0), (70, 2.0)):
            for seed in (100, 101):  # a dozen in all: each is a Triton compilation or two
                ours, expected = attention_on_device(dtype, window, softcap, seed)
                note = f"{dtype = }, {window = }, {softcap = }, {seed = }"
                for a, b in zip(ours, expected, strict=True):
                    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=lambda m, n=note: f"{n}: {m}")


def check_accepted_rows_are_kept():
    for seed in range(20):
        torch.manual_seed(seed)
        width, start = int(torch.randint(1, 20, ())), int(torch.randint(0, 30, ()))
        count = int(torch.randint(1, width + 1, ()))
        rows = torch.randperm(width)[:count].sort().values
        padded = torch.cat([rows, torch.full((width - count,), width - 1)])
        caches = [torch.randn(3, start + width, 20, dtype=torch.bfloat16, device=DEVICE) for _ in range(4)]
        expected = [cache.clone() for cache in caches]
        for cache in expected:
            cache[:, start : start + count] = cache[:, (start + rows).to(DEVICE)].clone()
        torch.ops.yggdrasil.keep_rows(
            caches, *(torch.tensor(value, device=DEVICE) for value in ([start], padded.tolist(), [count]))
        )
        for ours, theirs in zip(caches, expected, strict=True):
            assert torch.equal(ours, theirs), f"{seed = }"


def check_tokens_of_operators_run_one_by_one():
    pair = pair_on_device()
    for shape in (TreeShape(4, 3, 8), TreeShape(1, 4, 4)):
        tokens = pair.decoder(FixedPolicy(shape), backend="eager").generate(PROMPT, max_new_tokens=30).tokens
        assert tokens == pair.reference(PROMPT, 30), shape


def check_captured_tokens_equal_transformers():
    pair = pair_on_device()
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), FEW, backend="cudagraph")
    for speculation in (True, False):
        generation = decoder.generate(PROMPT, max_new_tokens=60, speculation=speculation)
        assert generation.tokens == pair.reference(PROMPT, 60), f"{speculation = }"
    runners = (decoder.assembly.target, decoder.assembly.drafter)
    steps = [step for runner in runners for step in runner._steps.values()]
    assert all(isinstance(step, InProcessStep) and step.is_compiled for step in steps), "not compiled"


def check_nothing_waits_and_nothing_is_recorded_twice():
    """A warm decoder calls nothing that synchronises but its own event, and records no graph while it decodes."""
    pair = pair_on_device()
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), FEW, backend="cudagraph")
    decoder.assembly.complete()
    decoder.generate(PROMPT, max_new_tokens=8)
    recorded = decoder.assembly.target.recorder.num_recorded
    torch.cuda.set_sync_debug_mode("error")
    try:
        generation = decoder.generate(PROMPT, max_new_tokens=50)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert generation.tokens == pair.reference(PROMPT, 50)
    assert decoder.assembly.target.recorder.num_recorded == recorded


def check_sampled_tokens_are_those_of_a_cpu():
    pair, on_cpu = pair_on_device(), make_pair()
    for options in ({"temperature": 6.0}, {"temperature": 8.0, "top_k": 5, "top_p": 0.9, "presence_penalty": 1.0}):
        sampling, tokens = SamplingParams(seed=4, **options), []
        for each, backend in ((pair, "cudagraph"), (on_cpu, "eager")):
            decoder = each.decoder(FixedPolicy(TreeShape(4, 3, 8)), FEW, backend=backend)
            tokens.append(decoder.generate(PROMPT, max_new_tokens=40, sampling=sampling).tokens)
        assert tokens[0] == tokens[1], options


def check_a_drafter_on_the_host():
    pair = pair_on_device()
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), FEW, backend="cudagraph", drafter=NGramDrafter())
    assert decoder.generate(PROMPT, max_new_tokens=40).tokens == pair.reference(PROMPT, 40)


def check_bfloat16_decodes():
    pair = pair_on_device(torch.bfloat16)
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), FEW, backend="cudagraph")
    tree, plain = (decoder.generate(PROMPT, max_new_tokens=40, speculation=on) for on in (True, False))
    same = sum(a == b for a, b in zip(tree.tokens, plain.tokens, strict=True))
    assert len(tree.tokens) == 40
    assert same >= 4, f"only {same} of 40 tokens agree before rounding can explain it"


CHECKS = [
    check_triton_is_used,
    check_attention_equals_the_portable_one,
    check_accepted_rows_are_kept,
    check_tokens_of_operators_run_one_by_one,
    check_captured_tokens_equal_transformers,
    check_nothing_waits_and_nothing_is_recorded_twice,
    check_sampled_tokens_are_those_of_a_cpu,
    check_a_drafter_on_the_host,
    check_bfloat16_decodes,
]
