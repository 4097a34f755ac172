"""A longer text than the plan's: within the model and the memory, or one sentence."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny_model, write_gguf
from tiny_pair import make_pair

import yggdrasil
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.pair import build_assembly
from yggdrasil.checkpoints.source import Source
from yggdrasil.engine import loading
from yggdrasil.engine.assembly import assemble
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime import gpu_memory, memory_limits
from yggdrasil.runtime import loading as models
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.gpu_memory import ToLoad, check_card, weight_bytes
from yggdrasil.runtime.memory_limits import cache_bytes, check_cache_memory
from yggdrasil.runtime.native_steps.loading import sizes_of
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.token_tree import TokenTree


def test_the_models_limit_is_named():
    pair = make_pair()
    check_cache_memory([pair.target, pair.drafter], 256, 400)
    with pytest.raises(YggdrasilError, match="max_length is 257, but tiny target was built for 256 tokens; give no mo"):
        check_cache_memory([pair.target, pair.drafter], 257, 400)


def test_memory_that_is_not_there_is_named(monkeypatch):
    pair = make_pair()
    needed = cache_bytes(pair.target, 400) + cache_bytes(pair.drafter, 400)
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: needed)
    check_cache_memory([pair.target, pair.drafter], 200, 400)
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: needed - 1)
    with pytest.raises(YggdrasilError, match=r"200, whose caches take .* GB, but .* GB of memory are left"):
        check_cache_memory([pair.target, pair.drafter], 200, 400)


CARD = torch.device("cuda")


def with_free(monkeypatch, num_bytes):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (num_bytes, 2 * num_bytes))


def test_what_pytorch_holds_of_a_card_for_later_is_free(monkeypatch):
    with_free(monkeypatch, 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 9)
    assert memory_limits.free_bytes(CARD) == 101


@pytest.mark.parametrize("weights", ["full", "file"])
def test_weights_take_what_is_said(tmp_path, weights):
    """Of a GGUF file, as it lies or dequantised, and of a folder."""
    model = tiny_model("llama", tie_word_embeddings=False)
    file = write_gguf(tmp_path / "model.gguf", model, kind=Kind.Q5_0)
    model.bfloat16().save_pretrained(tmp_path / "folder")
    source = Source.find(file)
    numbers = sum(each.numel() for each in model.parameters())
    matrices = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    expected = {"full": 2 * numbers, "file": matrices * 22 // 32 + 2 * (numbers - matrices)}
    assert weight_bytes(source, torch.bfloat16, weights) == expected[weights]
    if weights == "full":
        assert weight_bytes(Source.find(tmp_path / "folder"), torch.float32, "full") == 4 * numbers
        assert weight_bytes(Source.find(tmp_path / "folder"), torch.bfloat16, "q8_0") < 1.2 * numbers


def test_a_card_that_is_too_small_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    model = tiny_model("llama")
    source = Source.find(write_gguf(tmp_path / "model.gguf", model, kind=Kind.Q5_0))
    monkeypatch.setattr(gpu_memory, "_GRAPHS", 1000)
    weights = weight_bytes(source, torch.bfloat16, "full")
    caches = memory_limits.kv_bytes(sizes_of(source), torch.bfloat16, 80)
    needed = weights + caches + 1000 + 12 * 9 * sizes_of(source).vocab_size

    def check(num_free, is_there=False, device=CARD, stored="full", has_triton=True):
        with_free(monkeypatch, num_free)
        monkeypatch.setattr(gpu_memory, "has_triton", lambda: has_triton)
        check_card([ToLoad(source, stored, is_there)], torch.bfloat16, device, 64, 80, 9)

    check(needed)
    check(needed - weights, is_there=True)
    check(0, device=torch.device("cpu"))
    check(needed - 1, stored="file")
    for options in (
        {"num_free": needed - 1}, {"num_free": needed - weights - 1, "is_there": True},
        {"num_free": needed - 1, "stored": "file", "has_triton": False},
    ):  # fmt: skip
        with pytest.raises(YggdrasilError, match=r"model.gguf would take about .* GB of the GPU's memory are free"):
            check(**options)


def test_a_plan_for_a_card_that_is_too_small_loads_nothing(tmp_path, monkeypatch):
    """A first use, and a calibration."""
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), kind=Kind.Q5_0)
    with_free(monkeypatch, 1000)
    card = SimpleNamespace(total_memory=2000)
    for name, value in (("is_available", True), ("get_device_name", "a card"), ("get_device_properties", card)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(loading, "shared_model", lambda *_, **__: pytest.fail("loaded"))
    for name in ("YGGDRASIL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("loaded"))
    pair = PairSource(str(file), None, "bfloat16", 1, 1, Shapes(64, (), 1, 1, (1, 4), (8,)), device="cuda")
    message = r"would take about .* but 0\.0 GB of the GPU's memory are free"
    with pytest.raises(YggdrasilError, match=message):
        yggdrasil.Decoder.from_pretrained(file, device="cuda")
    with pytest.raises(YggdrasilError, match=message):
        build_assembly(pair)


def test_caches_that_a_card_cannot_hold_are_named_before_they_are_made(monkeypatch):
    pair, shapes = make_pair(), Shapes(100, (1,), 1, 2, (1, 4), (8,))
    models = [replace(model, device=torch.device("cuda")) for model in (pair.target, pair.drafter)]
    needed = sum(cache_bytes(model, shapes.cache_capacity) for model in models)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 1, 2 * needed))
    monkeypatch.setattr(TokenTree, "allocate", lambda *_: pytest.fail("buffers were made"))

    with pytest.raises(YggdrasilError, match="max_length is 100, whose caches take"):
        assemble(*models, shapes, "cudagraph")


def test_caches_take_what_is_said():
    target = make_pair().target
    cache = StaticCache.allocate(target.sizes, 400, target.dtype, target.device)

    assert cache_bytes(target, 400) == cache.num_bytes


def test_slots_behind_a_text_hold_no_memory_once_returned():
    target = make_pair().target
    cache = StaticCache.allocate(target.sizes, 4096, target.dtype, target.device, is_sparse=True)
    for each in cache.rows():
        each.fill_(1)
    cache.release_slots_from(1000)

    assert all(bool((each[:, :1000] == 1).all()) for each in cache.rows())
    left = sum(int(each.count_nonzero()) * each.element_size() for each in cache.rows())
    page = cache.arena.page
    # A tensor begins anywhere in a page.
    assert abs(left - cache.resident_bytes(1000)) <= page * sum(each.shape[0] for each in cache.rows())
    assert left < cache.num_bytes // 2
    assert cache.resident_bytes(4096) == cache.num_bytes
    cache.use_huge_pages()
    cache.release_slots_from(0)
    assert not any(each.any() for each in cache.rows())
    assert cache.arena.page == page


def test_the_system_says_what_is_left():
    left = memory_limits.available_bytes()
    assert left is None or left > 1 << 20


@pytest.mark.parametrize(
    ("limit", "left"), [("5000", 5000 - 3000 + 700 + 50), ("2000", 0), ("max", 8192), (None, 8192), ("900000", 8192)]
)
def test_a_containers_limit_counts_too(monkeypatch, tmp_path, limit, left):
    """Pages of files are dropped before memory is refused; a model's file alone would fill a container's."""
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 8 kB\n")
    monkeypatch.setattr(memory_limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_limits, "_CONTAINER", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("3000\n")
        (tmp_path / "memory.stat").write_text("anon 2250\nactive_file 50\ninactive_file 700\nshmem 0\n")

    assert memory_limits.available_bytes() == left


def test_a_plan_decodes_within_another_length():
    plan = next((Path(yggdrasil.__file__).parents[1] / "plans/tiny").glob("*.yaml"))
    decoder = yggdrasil.Decoder.from_plan(plan, backend="eager", force_machine=True, max_length=40)
    found = decoder.generate(list(range(5, 35)), max_new_tokens=50, ignore_eos=True)

    assert found.finish_reason == "context"
    assert len(found.tokens) == 40 - 30
    with pytest.raises(YggdrasilError, match=r"max_length is 99999, but .* was built for 2048 tokens; give no more"):
        yggdrasil.Decoder.from_plan(plan, backend="eager", force_machine=True, max_length=99999)
