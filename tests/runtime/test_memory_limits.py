"""A longer text than the plan's: within the model and the memory, or one sentence."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_pair import make_pair

import yggdrasil
from yggdrasil.engine.assembly import assemble
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime import memory_limits
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.memory_limits import cache_bytes, check_cache_memory, check_gpu_memory
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


def test_a_card_that_is_too_small_is_named_before_weights_go_there(monkeypatch):
    model, card = make_pair().target.model, torch.device("cuda")
    needed = sum(each.nbytes for each in model.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed, 2 * needed))
    check_gpu_memory(model, "tiny", card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 1, 2 * needed))
    check_gpu_memory(model, "tiny", torch.device("cpu"))
    with pytest.raises(YggdrasilError, match=r"weights of tiny take .* GB, but .* GB of the GPU's memory are free"):
        check_gpu_memory(model, "tiny", card)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)  # held for later tensors, one byte in none
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 9)
    check_gpu_memory(model, "tiny", card)


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
