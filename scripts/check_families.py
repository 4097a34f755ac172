#!/usr/bin/env python3
"""Try every text-generation architecture of transformers with a small random model: served, or refused and why?

Published models of hybrids are tried with their own layer sizes too.

    scripts/check_families.py --csv docs/results/families.csv

Each model is saved as a folder and loaded from it in float32; greedy decoding must write what transformers'
``generate`` writes or, where that differs at a near tie from one pass over the whole text, the tokens of that pass.
The trees have the text that ``generate`` wrote among wrong siblings, since no other draft fits random weights; every
third one goes wrong at its end. A row says how the architecture runs (native, or traced for TorchInductor), why it is
refused, or that something failed. Exit code 1 if anything failed. --merge keeps the rows of the file that are not tried
now; --page writes a summary of the file's rows between two marks of a page.
"""

import csv
import io
import signal
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from yggdrasil.cli import run_script
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError, one_line
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.native_steps.description import describe
from yggdrasil.runtime.selfcheck import check_tree_attention
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

CPU = torch.device("cpu")
SECONDS = 300  # of one architecture
NEW_TOKENS = 24
VOCABULARY = 128
SHAPES = Shapes(max_length=64, draft_widths=(2,), max_depth=3, candidates=2, verify_widths=(1, 8), prefill_widths=(8,))
# Sizes by the names that configurations have for them; of lists, what all layers need is derived from these.
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "n_embd": 64, "d_model": 64, "embed_dim": 64, "n_ctx": 128,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96, "num_hidden_layers": 4, "n_layer": 4,
    "n_layers": 4, "num_layers": 4, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256,
    "sliding_window": 6, "attention_chunk_size": 16, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "n_group": 1,
    "topk_group": 1, "num_dense_layers": 1, "first_k_dense_replace": 1, "decoder_sparse_step": 1, "rotary_dim": 8,
    "shared_expert_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 24, "global_head_dim": 32, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_global_key_value_heads": 1,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "state_size": 16, "ssm_state_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "word_embed_proj_dim": 64, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


MARKS = ("<!-- families -->", "<!-- end of families -->")
WORDS = {
    "native": "run by the native steps", "traced": "run through transformers' code (TorchInductor, or uncompiled)",
    "none": "not tried: transformers makes or runs no such small model", "failed": "fail",
}  # fmt: skip
REASONS = {  # by what the sentence says
    "encoder-decoder": "encoder-decoder models", "supports no tree mask": "attention of their own",
    "counts positions itself": "positions that cannot be given",
    "recurrent": "recurrent layers that trees do not reach", "could not be loaded": "no class of AutoModelForCausalLM",
    "PyTorch cannot write": "not done in time", "max_position_embeddings is": "positions without a limit",
    "query heads": "layers that differ in their query heads",
    "indexer": "sparse attention by an indexer", "ALiBi": "relative or ALiBi positions",
    "tree attention does not": "attention that ours does not compute",
    "does not run under": "code that does not run as a decode step",
}  # fmt: skip


# Moshi's layers see everything, and the cache of ``generate`` drops what lies before its window. BLT is four models.
_BLT: dict[str, object] = {
    **{field: SMALL[field] for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
_BLT_PART = {**_BLT, "hidden_size_global": SMALL["hidden_size"]}
OWN: dict[str, dict[str, object]] = {
    "moshi": {"sliding_window": 3000},
    "blt": {
        "patcher_config": _BLT, "encoder_config": _BLT_PART, "decoder_config": _BLT_PART, "global_config": _BLT,
        "encoder_hash_byte_group_vocab": 100,
    },
}  # fmt: skip


ATTEMPTS = tuple((seed, embedding) for seed in range(5) for embedding in (1.0, 0.1))
PROMPT = torch.tensor([[5, 9, 70, 33, 5, 9, 70, 41, 5, 9]])


class KnownText:
    """Drafter of a known text, among siblings that are wrong; every third draft goes wrong at its last level."""

    name = "known"
    capabilities = Capabilities()

    def __init__(self, text: Sequence[int]) -> None:
        self._text, self._length = text, 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)

    def extend(self, tokens: Sequence[int], states: object) -> None:
        self._length += len(tokens)

    def cost(self, budget: Budget) -> list[Step]:
        return [Step("own", budget.width or 1)]

    def propose(self, tree: Any, budget: Budget) -> None:
        node, width, depth = 0, budget.width, budget.depth
        for level, token in enumerate(self._text[self._length : self._length + depth]):
            for other in range(1, width):
                tree.attach(node, (token + other) % VOCABULARY, -2.0)
            is_wrong = level == depth - 1 and self._length % 3 == 0
            node = tree.attach(node, (token + width) % VOCABULARY if is_wrong else token, -0.1)


class Result(NamedTuple):
    """One row of the table."""

    architecture: str
    outcome: str  # native, traced, refused, failed, or none (no small configuration)
    note: str


# What some architectures need beside: as many key heads as others, layers of both kinds, or sizes that belong together.
OTHERWISE: tuple[dict[str, object], ...] = (
    {}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": 8},
    {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1},
    {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "num_hidden_layers": 8},
    {"layer_types": ["linear_attention", "full_attention"] * 2}, {"attn_layer_indices": [1]},
    {"layer_types": ["conv", "full_attention"] * 2},
)  # fmt: skip


# Layer sizes of published models, but two to four layers and a small vocabulary. They are from copies of config.json in
# public code; LFM2.5 and Qwen3.6-35B-A3B have those of LFM2 and Qwen3.5. Falcon-H1-1.5B's are those of the table in
# transformers' documentation, which lacks the MLP's size. The other fields of LFM2-8B-A1B are transformers' defaults,
# which its documentation says are this model's. Not compared with a published file: the MLP of Granite-4.0-H-350M.
_CONV = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3}
_GRANITE = {
    "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_d_state": 128, "mamba_n_heads": 48,
    "mamba_n_groups": 1, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
}  # fmt: skip
_GEMMA_4 = {
    "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_GEMMA_4_E = {
    **_GEMMA_4, "num_attention_heads": 8, "attention_k_eq_v": False, "hidden_size_per_layer_input": 256,
    "num_global_key_value_heads": None, "num_kv_shared_layers": 2, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "LFM2-1.2B": (
        "lfm2",
        {**_CONV, "intermediate_size": 12288, "block_multiple_of": 256, "block_auto_adjust_ff_dim": True,
         "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    "LFM2-8B-A1B": (
        "lfm2_moe",
        {**_CONV, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4,
         "num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "Granite-4.0-H-Tiny": (
        "granitemoehybrid",
        {**_GRANITE, "mamba_d_head": 64, "intermediate_size": 512, "shared_intermediate_size": 1024,
         "num_local_experts": 64, "num_experts_per_tok": 6},
    ),
    "Granite-4.0-H-350M": (
        "granitemoehybrid",
        {**_GRANITE, "hidden_size": 768, "mamba_d_head": 32, "shared_intermediate_size": 2048, "num_local_experts": 0,
         "num_experts_per_tok": 0},
    ),
    "Falcon-H1-1.5B": (
        "falcon_h1",
        {"hidden_size": 2048, "intermediate_size": 4608, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 128, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_d_head": 64,
         "mamba_d_ssm": 3072, "num_hidden_layers": 2},
    ),
    "Nemotron-Nano-9B-v2": (
        "nemotron_h",
        {"hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40, "num_key_value_heads": 8,
         "head_dim": 128, "ssm_state_size": 128, "n_groups": 8, "mamba_num_heads": 128, "mamba_head_dim": 80,
         "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    ),
    "Qwen3.5-27B": (
        "qwen3_5_text",
        {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4,
         "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Gemma-4-E2B": (
        "gemma4_text",
        {**_GEMMA_4_E, "hidden_size": 1536, "intermediate_size": 6144, "num_key_value_heads": 1},
    ),
    "Gemma-4-E4B": (
        "gemma4_text",
        {**_GEMMA_4_E, "hidden_size": 2560, "intermediate_size": 10240, "num_key_value_heads": 2},
    ),
    "Gemma-4-26B-A4B": (
        "gemma4_text",
        {**_GEMMA_4, "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16,
         "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True,
         "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8},
    ),
    "Gemma-4-31B": (
        "gemma4_text",
        {**_GEMMA_4, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
         "num_key_value_heads": 16, "num_global_key_value_heads": 4},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 64, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
         "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Qwen3-Next-80B-A3B": (  # half of the 512 experts, for memory
        "qwen3_next",
        {"hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2,
         "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
         "num_experts": 256, "num_experts_per_tok": 10, "num_hidden_layers": 2,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Qwen3.5-35B-A3B": (
        "qwen3_5_moe_text",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
         "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
         "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 2,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
}  # fmt: skip


def small_config(name: str, otherwise: dict[str, object]) -> PretrainedConfig:
    """The architecture's configuration with small sizes; of a multimodal one, of its text."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    text = default.get_text_config()
    known = text.to_dict() | dict.fromkeys(getattr(text, "attribute_map", {}))
    changes = {field: value for field, value in SMALL.items() if field in known and _is_size(known, field)}
    changes |= {field: value for field, value in (otherwise | OWN.get(name, {})).items() if field in known}
    if text is default:
        return kind(**changes)
    field = next(each for each in ("text_config", "llm_config", "decoder") if getattr(default, each, None) is text)
    return kind(**{field: type(text)(**changes).to_dict()})


def _is_size(known: dict[str, Any], field: str) -> bool:
    """Whether the field may be set: None says that a model lacks something, and lists are derived."""
    return not isinstance(known[field], list | dict) and (known[field] is not None or field.endswith("token_id"))


def random_model(config: PretrainedConfig, seed: int = 0, embedding: float = 1.0) -> PreTrainedModel:
    """A model whose choices differ from place to place; ``embedding`` is a factor of its embedding."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim >= 2 else parameter.add_(torch.randn_like(parameter) / 8)
        if embedding != 1.0:
            model.get_input_embeddings().weight.mul_(embedding)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """One word a token."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def small_model(
    name: str, others: Sequence[dict[str, object]] = OTHERWISE, varied: int = 0
) -> tuple[PreTrainedModel, list[int]]:
    """A random model of an architecture, or with a published model's layer sizes, and what it generates after PROMPT.

    ``others`` are sizes to set beside the small ones, tried in order until transformers runs the model. Weights are
    drawn again until the text has ``varied`` different tokens, at most ten times.

    Raises:
        ValueError: transformers makes or runs no such small model.
    """
    fault, (architecture, sizes) = "", PUBLISHED.get(name, (name, None))
    for otherwise in others if sizes is None else (sizes,):
        try:
            best = None
            for weights in ATTEMPTS:
                model = random_model(small_config(architecture, otherwise), *weights)
                text = _generated(model, PROMPT)
                if best is None or len({*text}) > len({*best[1]}):
                    best = model, text
                if len({*text}) >= varied:
                    break
            assert best is not None
            return best
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001  (transformers' own)
            fault = fault or one_line(error)[:160]
    raise ValueError(f"transformers makes or runs no such small model: {fault}")


def check(name: str, folder: Path) -> Result:
    """Try one architecture."""
    prompt = PROMPT
    try:
        model, expected = small_model(name)
        model.save_pretrained(folder)
        del model  # of a published size it is gigabytes
        tokenizer().save_pretrained(folder)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001  (transformers' own)
        return Result(name, "none", one_line(error))
    try:
        loaded = load_model(folder, torch.float32, CPU, 2)
        check_tree_attention(loaded)
        backend = "native" if describe(loaded.config) is not None else "eager"
        assembly = assemble(loaded, KnownText([*prompt[0].tolist(), *expected]), SHAPES, backend)
        decoder = Decoder(assembly, tokenizer(), FixedPolicy(TreeShape(2, 3, 8)), frozenset())
        found = decoder.generate(prompt[0].tolist(), max_new_tokens=NEW_TOKENS)
    except YggdrasilError as error:
        return Result(name, "refused", one_line(error).replace(f"{folder}: ", "").replace(f"{folder} ", ""))
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001  (what is to be found)
        return Result(name, "failed", f"{type(error).__name__}: {one_line(error)[:200]}")
    differs = list(found.tokens) != expected
    if differs and not _is_greedy(folder, prompt, found.tokens):
        return Result(name, "failed", f"other tokens than generate: {list(found.tokens)} for {expected}")
    if not differs and found.metrics.aal < 2:
        return Result(name, "failed", f"{found.metrics.aal:.1f} tokens an iteration: drafts are not accepted")
    note = f"{found.metrics.aal:.1f} tokens an iteration"
    if differs:
        note += "; generate differs from transformers' own pass over the whole text, whose tokens these are"
    return Result(name, "native" if backend == "native" else "traced", note)


def _generated(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :]
    found: list[int] = tokens.tolist()
    return found


def _is_greedy(folder: Path, prompt: torch.Tensor, tokens: Sequence[int]) -> bool:
    """Whether every token is the argmax of one pass of the saved model over the whole text, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = torch.cat([prompt, torch.tensor([list(tokens)])], dim=1)
    with torch.no_grad():
        logits = model(text).logits[0, prompt.shape[1] - 1 : -1]
    return logits.argmax(-1).tolist() == list(tokens)


def _read(table: Path) -> list[Result]:
    with table.open(newline="") as file:
        return [Result(*row) for row in csv.reader(file)][1:]


def summary(results: list[Result]) -> str:
    """A row an outcome, refused architectures by their reasons."""
    groups: dict[str, list[str]] = {}
    for result in results:
        reason = next((reason for sign, reason in REASONS.items() if sign in result.note), result.note)
        groups.setdefault(WORDS.get(result.outcome, f"refused: {reason}"), []).append(result.architecture)
    order = [*WORDS.values()]
    ranked = sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    rows = [f"| {what} | {', '.join(names)} |" for what, names in ranked]
    return "\n".join(["| | architectures |", "|---|---|", *rows])


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not done in {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def main(
    only: Annotated[
        list[str] | None,
        typer.Argument(help=f"Architectures by transformers' names, or {', '.join(PUBLISHED)}; all unless given."),
    ] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Write the table there.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Keep the file's rows of other architectures.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write a summary into this page.")] = None,
) -> None:
    """Try every text-generation architecture of transformers with a small random model."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    results = []
    for name in only or [*sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *PUBLISHED]:
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
            try:
                with time_limit():
                    result = check(name, Path(folder))
            except TimeoutError as error:
                result = Result(name, "failed", str(error))
        results.append(result)
        typer.echo(f"{result.architecture:28} {result.outcome:8} {result.note}")
    if table is not None:
        rows = {result.architecture: result for result in [*(_read(table) if merge else []), *results]}
        with table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([Result._fields, *(rows[name] for name in sorted(rows))])
    if page is not None and table is not None:
        before, _, rest = page.read_text().partition(MARKS[0])
        _, _, behind = rest.partition(MARKS[1])
        page.write_text(f"{before}{MARKS[0]}\n{summary(_read(table))}\n{MARKS[1]}{behind}")
    raise typer.Exit(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    run_script(main, "check_families")
