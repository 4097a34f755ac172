"""Training on a GPU, of which there is none here: on a device whose tensors do not mix with the processor's."""

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import pytest
from mtp_models import random_module, tiny_target, write_target
from own_texts import write_own_text
from tiny_pair import chat_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a tiny MiMo that has written what is trained on."""
    folder = tmp_path_factory.mktemp("there")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGGDRASIL_CACHE", str(folder / "cache"))
        target = write_target(folder / "target", "mimo", tiny_target("mimo"), random_module("mimo"))
        chat_tokenizer().save_pretrained(target)
        write_own_text(target, count=12)
    return folder


@pytest.fixture(scope="module")
def elsewhere(folder):
    """Runs what is in ``trained_on`` in a process that has that device."""
    with ProcessPoolExecutor(1, get_context("spawn"), import_module, ("trained_on",)) as processes:
        yield lambda name, *given: processes.submit(_called, name, *given).result()


def _called(name, *given):
    return getattr(import_module("trained_on"), name)(*given)


def test_a_head_learns_there_what_it_learns_here(folder, elsewhere):
    """It goes on there, too. What differs is rounding: the target's states are in bfloat16."""
    target = folder / "target"

    assert elsewhere("unlikeness", str(target), None, folder) < 0.12


@pytest.mark.slow
def test_a_target_writes_there_what_it_writes_here(folder, elsewhere):
    texts = elsewhere("texts_written", str(folder / "target"), folder)

    assert texts["cpu"][0] == texts["cuda"][0]
    assert min(count for _, count in texts.values()) > 1
