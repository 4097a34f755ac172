"""Tokens and operators against what they have to equal: float32 exactly, bfloat16 where the best logit leads."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attention_case import AttentionCase

from cuda_check.differences import check_tokens, first_difference
from cuda_check.models import bundled, expected_tokens, lead, modes, on_host, prompts, steps_of, tokenizer
from cuda_check.notes import DiffersError, Notes
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.drafters import NGramDrafter
from yggdrasil.drafters.heads.loading import LoadedHead, load_head
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import portable
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy, ModelFreePolicy, Policy
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import TreeShape

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Width, context, head size, query heads a key head, window, bound of scores: a dozen, each a compilation or two.
CASES = [
    (1, 150, 128, 1, 0, 0.0), (8, 64, 128, 4, 0, 0.0), (20, 9, 64, 3, 0, 0.0), (16, 150, 64, 1, 70, 0.0),
    (7, 65, 96, 2, 4, 2.0), (3, 0, 20, 5, 0, 0.0),
]  # fmt: skip
SAMPLED = {
    "temperature": SamplingParams(temperature=1.2, seed=1),
    "top-k, top-p, min-p": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02, seed=2),
    "bad words, typical-p": SamplingParams(
        temperature=1.2, typical_p=0.9, bad_words=((11,), (13, 198)), min_new_tokens=4, seed=4
    ),
    "all": SamplingParams(
        temperature=1.3,
        top_k=50,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias={11: 2.0},
        seed=3,
        logprobs=3,
    ),
}
RULES = {
    "relaxed": Speculation(rule="relaxed", relaxed_topk=6, relaxed_delta=2.0),
    "typical": Speculation(rule="typical", typical_epsilon=0.1, typical_delta=0.3),
}
AHEAD = {
    "tail ahead": {"tail_draft": "ahead", "bookkeeping": "overlapped"},
    "head ahead, depth late": {"head_draft": "ahead", "depth_prediction": "late", "bookkeeping": "overlapped"},
}
MTP = ("mimo", "glm4_moe")  # the second a mixture of experts
HYBRIDS = ("qwen3_5", "falcon_h1", "lfm2")
TREES = (TreeShape(4, 4, 16), TreeShape(1, 3, 4))


def float32(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES[:1] if tiny else CASES:
            width, context, head, group, window, _ = case
            name = f"attention {str(dtype).removeprefix('torch.')} W{width} S{context} D{head} G{group} w{window}"
            notes.attempt(name, partial(_attention, device, dtype, case))
    if device.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            name = f"attention {str(dtype).removeprefix('torch.')}, same bits at every width"
            notes.attempt(name, partial(_same_bits, device, dtype))
    notes.attempt("attention of few of a step's rows", partial(_few_rows, device))
    notes.attempt("rows are kept", lambda: _rows_are_kept(device, 1 if tiny else 8))
    found = notes.attempt("load the bundled pair", lambda: _describe(_pair(device, torch.float32)), always=True)
    if found is None:
        return
    pair = _pair(device, torch.float32)
    count, num_prompts = (4, 1) if tiny else (48, 3)
    wanted = expected_tokens(num_prompts, count)
    for mode in modes():
        notes.attempt(f"plain, {mode}", partial(_tokens, pair, device, mode, PLAIN_POLICY, wanted), seconds=8)
        for shape in TREES[: 1 if tiny else None]:
            policy = FixedPolicy(shape)
            notes.attempt(f"tree {shape}, {mode}", partial(_tokens, pair, device, mode, policy, wanted), seconds=8)
    _other_decodes(notes, device, wanted[:1], SAMPLED if not tiny else dict(list(SAMPLED.items())[-1:]))


def _other_decodes(
    notes: Notes, device: torch.device, wanted: Sequence[Sequence[int]], sampled: Mapping[str, SamplingParams]
) -> None:
    """Every kind of drafter, sampling, and what a GPU alone can show."""
    pair, mode, count = _pair(device, torch.float32), modes()[-1], len(wanted[0])
    for name, (policy, options) in _drafters().items():
        measure = partial(_tokens, pair, device, mode, policy, wanted, **options)
        notes.attempt(f"drafter {name}", measure, seconds=8)
    heads = _heads(pair[0])
    for name, head in heads.items():
        measure = partial(_tokens, pair, device, mode, FixedPolicy(TREES[0]), wanted, drafter=head)
        notes.attempt(f"head {name}", measure, seconds=8)
    together, options = _drafters()["model and n-grams"]
    with_head = {**options, "drafter": heads["eagle3"]}
    notes.attempt("head and n-grams", partial(_tokens, pair, device, mode, together, wanted, **with_head), seconds=8)
    for name, variants in list(AHEAD.items())[-1 if len(sampled) == 1 else 0 :]:
        stages = Schedule.of(variants).labels
        measure = partial(_tokens, pair, device, mode, FixedPolicy(TREES[0]), wanted, stages=stages)
        notes.attempt(f"schedule {name}", measure, seconds=8)
    for name, sampling in sampled.items():
        notes.attempt(f"sampled {name}", partial(_sampled, pair, device, mode, sampling, count), seconds=8)
    for name, rule in list(RULES.items())[-1 if len(sampled) == 1 else 0 :]:
        measure = partial(_sampled, pair, device, mode, SAMPLED["temperature"], count, rule)
        notes.attempt(f"rule {name}", measure, seconds=8)
    for family in HYBRIDS[: 1 if len(sampled) == 1 else None]:
        notes.attempt(f"hybrid {family}", partial(_hybrid, device, mode, family, min(count, 25)), seconds=8)
    for family in MTP[: 1 if len(sampled) == 1 else None]:
        notes.attempt(f"head mtp of {family}", partial(_mtp, device, mode, family, min(count, 25)), seconds=8)
    usual = FixedPolicy(TREES[0])
    for name, sampling, policy, given in (
        ("decoding", SamplingParams(), usual, {}),
        ("sampling", SAMPLED["all"], usual, {}),
        ("model and n-grams", SamplingParams(), together, options),
        ("head and n-grams", SamplingParams(), together, with_head),
        *((name, SamplingParams(), *_drafters()[name]) for name in ("n-gram", "n-grams alone")),
    ):
        if device.type == "cuda":
            check = partial(_nothing_waits, pair, device, sampling, count, policy, **given)
            notes.attempt(f"nothing waits while {name}", check, seconds=8)


def bfloat16(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    """Tokens against float32's; the lead of the best logit at a first divergence says whether rounding explains it."""
    pair = _pair(device, torch.bfloat16)
    count, num_prompts = (4, 1) if tiny else (48, 6)
    wanted = expected_tokens(num_prompts, count)
    for mode in modes()[-1:]:
        for name, policy in (("plain", PLAIN_POLICY), ("tree", FixedPolicy(TREES[0]))):
            notes.attempt(f"{name}, {mode}", partial(_leads, pair, device, mode, policy, wanted), seconds=8)


def _drafters() -> dict[str, tuple[Policy, dict[str, Any]]]:
    """Those without a model, alone and in one tree with the draft model, which is in every tree above."""
    from yggdrasil.drafters.statistics.drafter import default_statistics
    from yggdrasil.native import is_native

    counts = default_statistics if is_native() else NGramDrafter  # without the native library nothing is counted
    free, together = ModelFreePolicy(16), FixedPolicy(TREES[0])
    together.wants_model_free = True
    return {
        "n-gram": (FixedPolicy(TREES[0]), {"drafter": NGramDrafter()}),
        "n-grams alone": (free, {"drafter": None, "model_free": DrafterGroup([counts()])}),
        "model and n-grams": (together, {"model_free": DrafterGroup([counts()])}),
    }


def _heads(target: LoadedModel) -> dict[str, LoadedHead]:
    """Heads of random weights: their guesses are poor, and the way that they draft is whole."""
    from block_files import block_config, block_tensors
    from head_files import eagle_config, published_tensors, write_head
    from other_heads import first_config, first_shapes, medusa_shapes, random_tensors, write_medusa

    hidden, vocab = target.hidden_size, target.vocab_size
    config = eagle_config(vocab, vocab, hidden_size=hidden)
    with TemporaryDirectory() as folder:
        eagle = write_head(Path(folder) / "eagle3", config, published_tensors(config))
        medusa = write_medusa(Path(folder) / "medusa", random_tensors(medusa_shapes(hidden, vocab)))
        first = first_config(vocab, hidden_size=hidden)
        eagle1 = write_head(Path(folder) / "eagle1", first, random_tensors(first_shapes(first)))
        layers, sizes = range(0, target.num_layers, 2), {"hidden_size": hidden}
        block = block_config(vocab, block_size=5, layers=layers, target_layers=target.num_layers, **sizes)
        dflash = write_head(Path(folder) / "dflash", block, block_tensors(block))
        return {path.name: load_head(path, target, 1) for path in (eagle, eagle1, medusa, dflash)}


def _hybrid(device: torch.device, mode: str, family: str, count: int) -> str:
    """Tokens of a small random model with recurrent layers, with a drafter that knows most of them.

    Older releases of transformers cannot run LFM2 in a decode step. That is not a fault of the card.
    """
    from recurrent_models import SHAPES, recurrent_model
    from tiny_pair import TEXT

    model, prompt = recurrent_model(family), TEXT[:21]
    expected = model.reference(prompt, count)
    loaded = prepare_model(copy.deepcopy(model.plain).to(device), family, 1)
    with steps_of(mode, device) as backend:
        assembly = assemble(loaded, model.oracle(prompt, 30), SHAPES, backend)
        decoder = Decoder(assembly, tokenizer(), FixedPolicy(TreeShape(4, 4, 16)), frozenset())
        try:
            for _ in range(_rounds(device)):
                found = decoder.generate(prompt, max_new_tokens=count, ignore_eos=True).tokens
                check_tokens(decoder, prompt, found, expected, None)
        except YggdrasilError as refused:
            if "newer transformers" not in str(refused):
                raise
            return f"refused: {refused}"
    return "equal"


def _mtp(device: torch.device, mode: str, family: str, count: int) -> str:
    """Tokens of a small random model that brings a module for multi-token prediction, which drafts."""
    from mtp_models import random_module, tiny_target, write_target
    from tiny_pair import SHAPES, TEXT, generated

    model, prompt = tiny_target(family), TEXT[:21]
    expected = generated(model, tuple(prompt), count)
    loaded = prepare_model(copy.deepcopy(model).to(device), family, 1)
    with TemporaryDirectory() as folder:
        write_target(Path(folder), family, model, random_module(family))
        head = load_head(Path(folder), loaded, 1)
    with steps_of(mode, device) as backend:
        assembly = assemble(loaded, head, SHAPES, backend)
        decoder = Decoder(assembly, tokenizer(), FixedPolicy(TreeShape(2, 3, 8)), frozenset())
        for _ in range(2):  # run, then recorded
            found = decoder.generate(prompt, max_new_tokens=count, ignore_eos=True).tokens
            check_tokens(decoder, prompt, found, expected, lambda: model)
    return "equal"


def _attention(device: torch.device, dtype: torch.dtype, case: tuple[Any, ...]) -> str:
    width, context, head, group, window, bound = case
    step = AttentionCase(7, dtype, width=width, num_context=context, head_dim=head, group=group)
    expected = step.run(portable.tree_attention, window, bound)
    for name in ("query", "key", "value", "offsets", "mask"):
        setattr(step, name, getattr(step, name).to(device))
    step.caches = [cache.to(device) for cache in step.caches]
    for name, ours, theirs in zip(
        ("output", "keys", "values"), step.run(torch.ops.yggdrasil.tree_attention, window, bound), expected, strict=True
    ):
        _equal(name, ours, theirs, TOLERANCE[dtype])
    return "equal"


def _few_rows(device: torch.device) -> str:
    """Outputs of some rows, as draft heads read them; the keys and values of all are written."""
    step = AttentionCase(7, torch.float32, width=16, num_context=150, head_dim=64, group=2, has_fewer_queries=True)
    expected = step.run(portable.tree_attention)
    for name in ("query", "key", "value", "offsets", "mask"):
        setattr(step, name, getattr(step, name).to(device))
    step.caches = [cache.to(device) for cache in step.caches]
    found = step.run(torch.ops.yggdrasil.tree_attention)
    for name, ours, theirs in zip(("output", "keys", "values"), found, expected, strict=True):
        _equal(name, ours, theirs, TOLERANCE[torch.float32])
    return "equal"


def _same_bits(device: torch.device, dtype: torch.dtype) -> str:
    """A row of the first rows of a pass, whatever the number of rows behind it."""
    step = AttentionCase(7, dtype, width=64, num_context=1000, head_dim=128, group=4)
    for name in ("query", "key", "value", "offsets", "mask"):
        setattr(step, name, getattr(step, name).to(device))
    step.caches = [cache.to(device) for cache in step.caches]
    whole = step.run(torch.ops.yggdrasil.tree_attention)[0].cpu()
    for width in (1, 4, 16):
        _equal(f"output of {width} rows", step.first(width).run(torch.ops.yggdrasil.tree_attention)[0],
               whole[:, :width], 0.0)  # fmt: skip
    return "equal"


def _rows_are_kept(device: torch.device, cases: int) -> str:
    for seed in range(cases):
        generator = torch.Generator().manual_seed(seed)
        width, start = (int(torch.randint(1, high, (), generator=generator)) for high in (20, 30))
        count = int(torch.randint(1, width + 1, (), generator=generator))
        rows = torch.randperm(width, generator=generator)[:count].sort().values
        padded = torch.cat([rows, torch.full((width - count,), width - 1)])
        caches = [torch.randn(3, start + width, 20, generator=generator).bfloat16() for _ in range(4)]
        ours = [cache.to(device) for cache in caches]
        for cache in caches:
            cache[:, start : start + count] = cache[:, start + rows].clone()
        arguments = (torch.tensor([start]), padded, torch.tensor([count]))
        torch.ops.yggdrasil.keep_rows(ours, *(argument.to(device) for argument in arguments))
        for mine, theirs in zip(ours, caches, strict=True):
            _equal("kept rows", mine, theirs, 0.0)
    return "equal"


def _rounds(device: torch.device) -> int:
    """A GPU runs the work first and records it then; elsewhere both are the same."""
    return 2 if device.type == "cuda" else 1


def _equal(what: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    here = ours.cpu()
    if not torch.allclose(here.float(), expected.float(), atol=tolerance, rtol=tolerance, equal_nan=False):
        raise DiffersError(what, here, expected)


_pairs: dict[torch.dtype, tuple[LoadedModel, LoadedModel]] = {}


def _pair(device: torch.device, dtype: torch.dtype) -> tuple[LoadedModel, LoadedModel]:
    if dtype not in _pairs:
        _pairs[dtype] = bundled("target", device, dtype), bundled("drafter", device, dtype)
    return _pairs[dtype]


def _describe(pair: Sequence[LoadedModel]) -> list[str]:
    return [f"{model.name}, {model.num_layers} layers, {model.dtype}" for model in pair]


def _decoder(
    pair: tuple[LoadedModel, LoadedModel], device: torch.device, mode: str, policy: Policy, **options: Any
) -> Decoder:
    shapes = Shapes(
        max_length=200,
        draft_widths=(1, 4),
        max_depth=4,
        candidates=8,
        verify_widths=(1, 4, 16),
        prefill_widths=(16, 96),
    )
    drafter = options.pop("drafter", pair[1])
    with steps_of(mode, device) as backend:
        assembly = assemble(pair[0], drafter, shapes, backend, **options)
        for runner in (assembly.target, assembly.drafter):
            for step in runner.defined if runner is not None else ():
                runner.step(*step)  # decided here: compiled and recorded when first used
    return Decoder(assembly, tokenizer(), policy, frozenset())


def _tokens(
    pair: tuple[LoadedModel, LoadedModel], device: torch.device, mode: str, policy: Policy,
    wanted: Sequence[Sequence[int]], **options: Any,
) -> Any:  # fmt: skip
    decoder = _decoder(pair, device, mode, policy, **options)
    for _ in range(_rounds(device)):
        for text, expected in zip(prompts(), wanted, strict=False):
            found = decoder.generate(text, max_new_tokens=len(expected)).tokens
            check_tokens(decoder, text, found, expected, partial(on_host, "target"))
    refused = _uncompiled(decoder) if mode == "compiled" else []
    return {"equal": len(wanted), "uncompiled": refused} if refused else "equal"


def _uncompiled(decoder: Decoder) -> list[str]:
    steps: list[Any] = []
    for runner in (decoder.assembly.target, decoder.assembly.drafter):
        steps += [] if runner is None else runner._steps.values()
    return [
        step.name for step in steps if not step.is_compiled and not step.name.startswith("prefill") and step.has_run
    ]


def _leads(
    pair: tuple[LoadedModel, LoadedModel], device: torch.device, mode: str, policy: Policy,
    wanted: Sequence[Sequence[int]],
) -> dict[str, Any]:  # fmt: skip
    decoder, leads, num_equal = _decoder(pair, device, mode, policy), [], 0
    for text, expected in zip(prompts(), wanted, strict=False):
        found = decoder.generate(text, max_new_tokens=len(expected)).tokens
        same = first_difference(found, expected)
        num_equal += same == len(expected)
        if same < len(expected):
            leads.append({"at": same, "lead": round(lead([*text, *expected[:same]]), 4)})
    return {"equal": num_equal, "of": len(wanted), "first_divergences": leads}


def _sampled(
    pair: tuple[LoadedModel, LoadedModel], device: torch.device, mode: str, sampling: SamplingParams, count: int,
    rule: Speculation | None = None,
) -> str:  # fmt: skip
    """Tokens and log-probabilities of the host's sampler on the processor, which has the same random numbers.

    One token may be a near tie. With a lossy ``rule`` the tokens depend on the tree, so the processor drafts it too.
    """
    processor = torch.device("cpu")
    here = bundled("target", processor, torch.float32), bundled("drafter", processor, torch.float32) if rule else None
    options = {"max_new_tokens": count, "sampling": sampling, **({"speculation": rule} if rule else {})}
    policy = FixedPolicy(TREES[0]) if rule else PLAIN_POLICY
    reference = _decoder(here, processor, "eager", policy).generate(prompts()[0], **options)
    expected = reference.tokens
    decoder = _decoder(pair, device, mode, FixedPolicy(TREES[0]))
    for _ in range(_rounds(device)):
        answer = decoder.generate(prompts()[0], **options)
        found = answer.tokens
        check_tokens(decoder, prompts()[0], found, expected, partial(on_host, "target"))
        ours, theirs = ([each.logprob for each in one.logprobs or ()] for one in (answer, reference))
        _equal("log-probabilities", torch.tensor(ours), torch.tensor(theirs), 1e-3)
    return "equal"


def _nothing_waits(
    pair: tuple[LoadedModel, LoadedModel], device: torch.device, sampling: SamplingParams, count: int, policy: Policy,
    **options: Any,
) -> str:  # fmt: skip
    """A warm decoder calls nothing that synchronises but its own event, and records no graph while it decodes."""
    decoder = _decoder(pair, device, modes()[-1], policy, **options)
    decoder.assembly.complete()
    expected = decoder.generate(prompts()[0], max_new_tokens=count, sampling=sampling).tokens
    recorder = decoder.assembly.target.recorder
    assert recorder is not None
    recorded, request = recorder.num_recorded, decoder.start(prompts()[0], max_new_tokens=count, sampling=sampling)
    pieces = iter(request)
    next(pieces)  # the prompt is read and the request's parameters are written
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in pieces:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if recorder.num_recorded != recorded:
        raise AssertionError(f"{recorder.num_recorded - recorded} graphs were recorded while decoding")
    if list(request.tokens) != expected:
        raise AssertionError("other tokens")
    return f"{recorded} graphs"


def summary(results: Mapping[str, Any]) -> list[str]:
    """A line for a person: how many checks are equal, and the others by name."""
    checks = {name: value for name, value in results.items() if name not in ("seconds", "load the bundled pair")}
    others = [name for name, value in checks.items() if value != "equal" and "equal" not in value]
    return [f"  {len(checks) - len(others)} of {len(checks)} equal; others: {', '.join(others) or 'none'}"[:300]]
