"""A text that a head follows: rows are kept as far as they were read, whether the head has drafted or not."""

from types import SimpleNamespace

import pytest
import torch

from yggdrasil.drafters.heads.text_drafter import TextHeadDrafter, WaitingStates
from yggdrasil.runtime.kept_text import KeptText
from yggdrasil.tree.token_tree import TokenTree


class Following(TextHeadDrafter):
    """Follows a text and drafts nothing."""

    def _draft_head(self):
        raise NotImplementedError

    def _next_head(self, passed):
        raise NotImplementedError

    def grow(self, width, depth):
        raise NotImplementedError


@pytest.fixture
def drafter():
    tree = TokenTree.allocate(4, 2, torch.device("cpu"))
    runner, waiting = SimpleNamespace(text=KeptText()), WaitingStates([0], torch.zeros(8, 4))
    return Following(runner, waiting, (0,), torch.zeros(2), 1, tree, 4)


def states(count):
    return {0: torch.randn(count, 4)}


def read(drafter):
    """What waits has rows now, as after a pass."""
    drafter._waiting.clear()
    drafter._text.num_rows = len(drafter._text.tokens)


def test_a_request_that_never_drafts_leaves_no_more_rows_than_there_were(drafter):
    assert drafter.capabilities.num_kept([5, 6, 7]) == 0
    drafter.begin([5, 6, 7])
    drafter.extend([8], states(1))
    read(drafter)
    assert drafter.capabilities.num_kept([5, 6, 7, 8, 9]) == 4

    drafter.begin([5, 6, 1, 2])  # rows of 6 alone are its
    assert [drafter.capabilities.num_kept(text) for text in ([5, 6, 1, 2], [5, 6, 7, 8], [4, 6, 1], [])] == [2, 2, 0, 0]
    drafter.begin([4, 6, 1])  # nothing is, where the first token is another
    assert drafter.capabilities.num_kept([4, 6, 1]) == 1


def test_states_that_wait_need_not_come_again(drafter):
    """As after a request whose head did not draft: none has a row, and the same prompt asks for its last alone."""
    drafter.begin([5])
    drafter.extend([6, 7, 8], states(3))
    first = drafter._waiting._buffer[:3].clone()
    assert drafter.capabilities.num_kept([5, 6, 7, 9]) == 3
    drafter.begin([5, 6, 7])
    drafter.extend([9], states(1))
    assert drafter.num_waiting == 3
    torch.testing.assert_close(drafter._waiting._buffer[:2], first[:2])


def test_states_of_a_text_that_the_cache_has_no_more_are_not_kept(drafter):
    drafter.begin([5])
    drafter.extend([6, 7], states(2))
    drafter._text.begin([3, 4, 6, 7], 4, [5])  # as where the rows of another conversation came back
    assert drafter.num_waiting == 0
    assert drafter.capabilities.num_kept([5, 3, 4, 6, 7]) == 5
    drafter.begin([5, 3, 4])
    assert len(drafter._waiting) == 0


def test_many_states_are_cut_where_the_text_parts(drafter):
    drafter.begin([5])
    drafter.extend(list(range(10, 22)), states(12))  # more than the buffer holds
    drafter.extend([22, 23], states(2))
    drafter.begin([5, *range(10, 15)])
    assert drafter.num_waiting == 5


def test_states_that_waited_for_another_text_are_dropped(drafter):
    drafter.begin([5, 6])
    drafter.extend([7, 8], states(2))
    assert len(drafter._waiting) == 2
    drafter.begin([6, 5])
    assert len(drafter._waiting) == 0


def test_rows_of_a_place_that_is_pretended_are_kept_for_no_text(drafter):
    drafter.pretend_context(5, 3)
    assert len(drafter._waiting) == 1
    assert drafter.capabilities.num_kept([3] * 5) <= 1
